# The `hpo` command with every optional part. `docker build -t hpo-service .`
FROM python:3.11-slim

# A further package index for torch, such as one with CPU builds: --build-arg TORCH_INDEX=URL. The default index has
# the CUDA build.
ARG TORCH_INDEX=

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# The largest layer first, and by itself: it changes with constraints.txt only.
WORKDIR /src
COPY constraints.txt ./
RUN pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints.txt torch

COPY pyproject.toml README.md LICENSE ./
COPY trainer trainer
COPY hpo hpo
RUN pip install -c constraints.txt '.[all]'

# An agent's workers share two connections to PostgreSQL through it.
RUN apt-get update && apt-get install -y --no-install-recommends pgbouncer && rm -rf /var/lib/apt/lists/*

# A driver in a Kubernetes cluster (`hpo submit`) needs kubectl: --build-arg KUBECTL_VERSION=v1.33.0.
ARG KUBECTL_VERSION=
RUN [ -z "$KUBECTL_VERSION" ] || { python -c 'import sys, urllib.request as r; r.urlretrieve(*sys.argv[1:])' \
      "https://dl.k8s.io/release/$KUBECTL_VERSION/bin/linux/$(dpkg --print-architecture)/kubectl" \
      /usr/local/bin/kubectl && chmod 755 /usr/local/bin/kubectl; }

# Compose runs it as the owner of the study's folder, who has no entry in /etc/passwd: hence HOME and USER. By number,
# for Kubernetes lets no name pass where it lets no root run.
RUN useradd --uid 1000 --create-home hpo
USER 1000:1000
ENV HOME=/tmp \
    USER=hpo

WORKDIR /study
ENTRYPOINT ["hpo"]
CMD ["--help"]
