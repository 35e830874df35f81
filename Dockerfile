# An image with the CUDA lock, made by the set-up in README and nothing else. IT HAS NOT BEEN BUILT: there was no Docker where it was
# written. tests/unit/test_scripts.py holds its steps against scripts/setup.sh.
#
#   docker build --tag hotbunk .                                                        # needs 40 GiB of free disk
#   docker run --init --gpus all --ipc host hotbunk                                     # hotbunk doctor: is this machine fit?
#   docker run --init --gpus all --ipc host --volume "$PWD:/work" hotbunk hotbunk train recipe.yaml
#
# CUDA's libraries are in the lock's wheels. The driver is the host's, 580 or newer, with the NVIDIA Container Toolkit.
FROM ubuntu:24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.12 python3.12-venv python3.12-dev g++ \
    && rm -rf /var/lib/apt/lists/*

COPY . /opt/hotbunk
RUN HOTBUNK_DEVICE=cuda PYTHON=python3.12 bash /opt/hotbunk/scripts/setup.sh

ENV PATH=/opt/hotbunk/.venv/bin:$PATH
# The toolkit gives a container whose image is not NVIDIA's these alone: CUDA, and nvidia-smi.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /work
CMD ["hotbunk", "doctor"]
