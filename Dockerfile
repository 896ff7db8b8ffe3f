# One image for every host of a run.
#   docker build --build-arg EXTRAS=tpu,buckets -t maxdiloco .        TPU slices, runs in buckets
#   docker build --build-arg EXTRAS=cuda13 -t maxdiloco .         NVIDIA GPUs; cuda12 before 580
#   docker run maxdiloco key=value ...                            = python -m maxdiloco.train
#
# It runs as user 10001, who is in no /etc/passwd; so may any other be. A folder that is mounted for
# the output belongs to the one who runs it:
#   docker run --user "$(id -u):$(id -g)" -v "$PWD/runs:/opt/maxdiloco/runs" maxdiloco key=value ...
# Where only root may open the TPU's devices: --user 0, runAsUser: 0 in a manifest, or, for xpk,
# which sets no user, --build-arg USER_ID=0.
#
# The packages are installed by their hashes. The base is named by its tag, which moves; its digest,
# for a build that can be repeated, is printed by `docker buildx imagetools inspect python:3.12-slim`:
#   docker build --build-arg BASE=python:3.12-slim@sha256:DIGEST ...
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG EXTRAS=tpu,buckets
ARG USER_ID=10001
WORKDIR /opt/maxdiloco

# The dependencies alone: this layer is built again only when setup.py or a pin changes.
COPY setup.py requirements.lock ./
COPY scripts/lock.py scripts/
RUN python scripts/lock.py extras "${EXTRAS}" >pins.txt \
    && pip install --no-cache-dir --require-hashes --no-deps -r pins.txt \
    && rm -r pins.txt scripts

# The sources go once they are installed, so that what runs is what a user imports. Whoever runs it
# may write to `runs`, the default for the output, and to the home folder, for caches.
COPY pyproject.toml ./
COPY maxdiloco maxdiloco
COPY configs configs
RUN pip install --no-cache-dir --no-build-isolation --no-deps . \
    && rm -rf build *.egg-info maxdiloco \
    && mkdir -m 1777 runs home \
    && chmod -R a+rX configs
ENV HOME=/opt/maxdiloco/home USER=maxdiloco
USER ${USER_ID}:${USER_ID}

# As process 1 every program of maxdiloco listens to SIGTERM itself.
ENTRYPOINT ["python", "-m", "maxdiloco.train"]
