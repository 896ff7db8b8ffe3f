# One image for every host of a run.
#   docker build --build-arg EXTRAS=tpu,buckets -t maxdiloco .        TPU slices, runs in buckets
#   docker build --build-arg EXTRAS=cuda13 -t maxdiloco .         NVIDIA GPUs; cuda12 before 580
#   docker run maxdiloco key=value ...                            = python -m maxdiloco.train
FROM python:3.12-slim
ARG EXTRAS=tpu,buckets
WORKDIR /opt/maxdiloco

# The dependencies alone: this layer is built again only when setup.py or a pin changes.
# What the build of the empty package leaves is newer than the files copied below, so it goes.
COPY setup.py pyproject.toml constraints.txt ./
RUN mkdir -p maxdiloco configs && touch maxdiloco/__init__.py \
    && pip install --no-cache-dir -c constraints.txt setuptools \
    && pip install --no-cache-dir -c constraints.txt --no-build-isolation ".[${EXTRAS}]" \
    && rm -rf build *.egg-info maxdiloco configs

# The sources go once they are installed, so that what runs is what a user imports.
COPY maxdiloco maxdiloco
COPY configs configs
RUN pip install --no-cache-dir --no-build-isolation --no-deps --force-reinstall . \
    && rm -rf build *.egg-info maxdiloco

ENTRYPOINT ["python", "-m", "maxdiloco.train"]
