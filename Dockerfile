# syntax=docker/dockerfile:1
# x86-64, CUDA 13: h3dist with its attention extras, SageAttention 2 built for sm120, and sshd for rented pods.
#   docker build -t NAME:VERSION .                 for pods: sshd, root, as clouds want it (the last stage)
#   docker build --target run -t NAME:VERSION .    for your own machine: no sshd, an ordinary user
ARG CUDA=13.0.1

FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git ninja-build python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/h3dist
COPY constraints.txt /src/
RUN /opt/h3dist/bin/pip install --no-cache-dir -c /src/constraints.txt \
    torch==2.13.0 numpy==2.4.6 hatchling==1.33.0 packaging==26.4 psutil==7.2.2 setuptools==84.2.1
# built before the package is copied, so that a change of the package does not build them again
ARG MAX_JOBS=8
ARG FLASH_ATTENTION=2.8.3.post2
RUN FLASH_ATTN_CUDA_ARCHS=120 MAX_JOBS=${MAX_JOBS} /opt/h3dist/bin/pip install --no-cache-dir \
    --no-build-isolation -c /src/constraints.txt flash-attn==${FLASH_ATTENTION}
# version 2.2.0; what is on the package index is the older Triton version
ARG SAGE_ATTENTION=d1a57a546c3d395b1ffcbeecc66d81db76f3b4b5
RUN TORCH_CUDA_ARCH_LIST=12.0 EXT_PARALLEL=4 MAX_JOBS=${MAX_JOBS} /opt/h3dist/bin/pip install --no-cache-dir \
    --no-build-isolation --no-deps "sageattention @ git+https://github.com/thu-ml/SageAttention@${SAGE_ATTENTION}"
COPY h3dist/cloud/onpod/sage.py /opt/h3dist/sage.py
RUN /opt/h3dist/bin/python /opt/h3dist/sage.py --import-only
COPY pyproject.toml README.md LICENSE /src/
COPY conf /src/conf
COPY h3dist /src/h3dist
RUN /opt/h3dist/bin/pip install --no-cache-dir --no-build-isolation -c /src/constraints.txt '/src[flash,flash4]'

FROM nvidia/cuda:${CUDA}-runtime-ubuntu24.04 AS run
ARG VERSION=0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="h3dist" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.licenses="Apache-2.0" \
    h3dist.torch="2.13.0" \
    h3dist.sageattention="2.2.0, sm120"
# gcc and the headers: Triton compiles its launchers where it runs
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/h3dist /opt/h3dist
RUN ln -s /opt/h3dist/bin/h3dist /opt/h3dist/bin/hf /opt/h3dist/bin/torchrun /usr/local/bin/ \
    && useradd --create-home --uid 1001 h3 && mkdir /work && chown h3 /work
# the layout that `hf download --local-dir /models` makes; a tokenizer's path is no secret
# hadolint ignore=DL3064
ENV H3_MODEL_PATH=/models/minimax_h3_fl2va_pruned_nvfp4.safetensors \
    H3_TEXT_ENCODER_PATH=/models/text_encoders/qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors \
    H3_VIDEO_VAE_PATH=/models/vae/minimax_h3_video_vae_fp16.safetensors \
    H3_AUDIO_VAE_PATH=/models/vae/minimax_h3_audio_vae_fp32.safetensors \
    H3_TOKENIZER_PATH=/models/FL2VA/tokenizer
USER 1001
WORKDIR /work
CMD ["h3dist", "--help"]

FROM run AS pod
# sshd and RunPod's volumes want root; the `run` stage is the one without it
# hadolint ignore=DL3002
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates curl openssh-server rsync tmux \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*
COPY h3dist/cloud/onpod/start.sh /start.sh
RUN chmod 755 /start.sh
EXPOSE 22
CMD ["/start.sh"]
