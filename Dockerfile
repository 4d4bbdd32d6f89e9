# `asyncllm serve` from a wheel, without a compiler. Build the wheel first (docs/releasing.md), then:
#
#     docker build -t asyncllm .
#     docker run --read-only --tmpfs /tmp -v models:/models -p 8000:8000 -e TOKEN=secret asyncllm
#
# For a GPU: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130, and `docker run --gpus all`.
FROM python:3.13-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=bind,target=/source \
    pip install --no-cache-dir --no-compile -c /source/constraints.txt --extra-index-url "$TORCH_INDEX" \
    "$(ls /source/dist/asyncllm-*-manylinux_2_28_$(uname -m).whl)[server,uvloop]"

RUN useradd --uid 10001 --no-create-home asyncllm && install -d -o asyncllm /models
USER asyncllm
# Hub models are kept on the volume; the rest of the file system may be read-only.
ENV HF_HOME=/models HOME=/tmp PYTHONDONTWRITEBYTECODE=1
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=5m CMD ["python", "-c", \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
# The shell gives way to the server, which gets the signals. Without a token it does not start.
ENTRYPOINT ["sh", "-c", "exec asyncllm serve --host 0.0.0.0 --token \"${TOKEN:?set a token}\" \"$@\"", "serve"]
