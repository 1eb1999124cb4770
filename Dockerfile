# Two images from one file: --build-arg VARIANT=cpu (the default) or cuda. See docs/docker.md.
ARG BASE=docker.io/library/python:3.11-slim-bookworm
ARG VARIANT=cpu

# Everything that needs a compiler happens here; /opt/luceasync is what the images take.
FROM ${BASE} AS build
ARG VARIANT
ARG TORCH_INDEX=""
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src

# Dependencies first: this layer stays while only our own code changes.
COPY pyproject.toml constraints.txt ./
RUN python3 -m venv /opt/luceasync \
    && python3 -c 'import sys, tomllib; \
project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
extra = project["optional-dependencies"].get(sys.argv[1], []); \
print(*project["dependencies"], *extra, sep="\n")' "${VARIANT}" > /tmp/requirements.txt \
    && /opt/luceasync/bin/pip install --no-cache-dir --disable-pip-version-check \
        --constraint constraints.txt --requirement /tmp/requirements.txt \
        ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} \
    && /opt/luceasync/bin/python -c 'import sys, torch; \
sys.argv[1] == "cpu" and torch.version.cuda and print("luceasync: this torch is built for CUDA, \
several GB that a CPU does not need: name the index of CPU builds, --build-arg TORCH_INDEX=...")' "${VARIANT}"

COPY setup.py LICENSE README.md ./
COPY cuda cuda
COPY cyext cyext
COPY luceasync luceasync
RUN /opt/luceasync/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps .

FROM ${BASE} AS runtime-cpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/*

# Triton compiles its launchers at run time; CUDA itself came with torch.
FROM ${BASE} AS runtime-cuda
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev tini \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM runtime-${VARIANT}
COPY --from=build /opt/luceasync /opt/luceasync
# Any --user works: what is written goes to /cache, and no name is looked up in /etc/passwd.
RUN mkdir -m 1777 /cache
ENV PATH=/opt/luceasync/bin:$PATH \
    HOME=/cache \
    USER=luceasync \
    XDG_CACHE_HOME=/cache \
    NUMBA_CACHE_DIR=/cache/numba \
    TRITON_CACHE_DIR=/cache/triton \
    LUCEASYNC_KV_CACHE_DIR=/cache/prefixes \
    PYTHONUNBUFFERED=1 \
    LUCEASYNC_HOST=0.0.0.0
USER 10001:10001
WORKDIR /cache
VOLUME /cache
EXPOSE 8000
# Asks /ready, at the address, the port and with the protocol of the running server.
HEALTHCHECK --interval=10s --timeout=10s --start-period=10m --retries=3 CMD ["luceasync", "health"]
# The kernel drops signals that process 1 does not handle: without an init, neither Ctrl-C nor
# SIGTERM would end a server that is starting.
ENTRYPOINT ["tini", "-s", "--", "luceasync"]
CMD ["serve"]
