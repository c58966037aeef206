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

# Compose runs it as the owner of the study's folder, who has no entry in /etc/passwd: hence HOME and USER.
RUN useradd --create-home hpo
USER hpo
ENV HOME=/tmp \
    USER=hpo

WORKDIR /study
ENTRYPOINT ["hpo"]
CMD ["--help"]
