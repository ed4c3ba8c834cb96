# docker build -t gaupipe .    with the torch that pip takes, which is that for CUDA on Linux: run it with --gpus all
# docker build -t gaupipe --build-arg INDEX=URL .    with torch from another index, such as that for CPUs alone
FROM python:3.12-slim
ARG INDEX
WORKDIR /gaupipe
COPY . .
RUN pip install --no-cache-dir ${INDEX:+--extra-index-url "$INDEX"} .
WORKDIR /work
ENTRYPOINT ["gaupipe"]
