# One image for every host of a run.
#   docker build --build-arg EXTRAS=tpu,buckets -t maxdiloco .    TPU slices, runs in buckets
#   docker build --build-arg EXTRAS=cuda13 -t maxdiloco .         NVIDIA GPUs; cuda12 before 580
#   docker run maxdiloco key=value ...                            = python -m maxdiloco.train
#
# The image runs as user 10001, and works for any other user too. To write into a mounted folder,
# run it as the owner of the folder:
#   docker run --user "$(id -u):$(id -g)" -v "$PWD/runs:/opt/maxdiloco/runs" maxdiloco key=value ...
# If only root may open the TPU's devices, use --user 0, or runAsUser: 0 in a manifest. xpk sets no
# user, so build the image for it with --build-arg USER_ID=0.
#
# The packages are pinned by their hashes. The tag of the base image may change. For a reproducible
# build pass its digest, which `docker buildx imagetools inspect python:3.12-slim` prints:
#   docker build --build-arg BASE=python:3.12-slim@sha256:DIGEST ...
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG EXTRAS=tpu,buckets
ARG USER_ID=10001
WORKDIR /opt/maxdiloco

# Only the dependencies: this layer is built again only when setup.py or a pin changes.
COPY setup.py requirements.lock ./
COPY scripts/lock.py scripts/
RUN python scripts/lock.py extras "${EXTRAS}" >pins.txt \
    && pip install --no-cache-dir --require-hashes --no-deps -r pins.txt \
    && rm -r pins.txt scripts

# The sources are removed after the installation, so that the installed package is imported. Every
# user may write to `runs`, the default folder of the output, and to the home folder, for caches.
COPY pyproject.toml ./
COPY maxdiloco maxdiloco
COPY configs configs
RUN pip install --no-cache-dir --no-build-isolation --no-deps . \
    && rm -rf build *.egg-info maxdiloco \
    && mkdir -m 1777 runs home \
    && chmod -R a+rX configs
ENV HOME=/opt/maxdiloco/home USER=maxdiloco
USER ${USER_ID}:${USER_ID}

# Every program of maxdiloco handles SIGTERM, also as process 1.
ENTRYPOINT ["python", "-m", "maxdiloco.train"]
