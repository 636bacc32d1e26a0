# megatron_burst on the PyTorch image that Megatron-Core 0.19 is tested with; see docker/README.md.

# NVIDIA's PyTorch image, REGISTRY/nvidia/pytorch:26.06-py3; it has no default. A tag may be moved to
# another image, a digest not: pin one with …/pytorch@sha256:… (docker/README.md).
ARG BASE_IMAGE

# Replaced by docker build --build-context megatron-lm=DIR, a checkout of Megatron-LM.
FROM scratch AS megatron-lm

FROM ${BASE_IMAGE}
ARG USER_ID=1000
COPY . /opt/megatron_burst
COPY --from=megatron-lm . /opt/megatron-lm
RUN ["/bin/bash", "-c", "/opt/megatron_burst/docker/install.sh --megatron /opt/megatron-lm --user \"${USER_ID}\""]
USER ${USER_ID}
WORKDIR /home/burst
CMD ["python3", "-m", "megatron_burst", "doctor"]
