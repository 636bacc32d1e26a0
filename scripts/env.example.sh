#!/usr/bin/env bash
# Settings of your site, all in one file. Copy it to scripts/env.sh (git ignores that) and take the
# "#" off the lines that you need, or keep it elsewhere and set BURST_ENV to its path. The launchers
# read it where they are started and again on every node. Written as `: "${X:=value}"`, a setting
# gives way to the same variable in the environment, so that you can change one for one run.
#
# What a node found by itself stands in node-N.json of the run's output.

# ---- Python, ranks, container ---------------------------------------------------------------------
# The Python of the training. Default: .venv of this repository (scripts/setup.sh), else python3; in a
# container the image's python3.
# : "${BURST_PYTHON:=/path/to/python}"
# Ranks on a node. Default: one a GPU. Needed on machines without one (with MEGATRON_BURST_CPU=1).
# : "${BURST_RANKS_PER_NODE:=8}"
# A container for the ranks: for Slurm anything that pyxis takes or a file .sif of Apptainer, else an
# image of docker. The
# repository, the current directory and the output are mounted under their own paths; your data is
# not, so name it: host:container, with commas between several.
# : "${BURST_IMAGE:=megatron-burst}"
# : "${BURST_MOUNTS:=/data:/data}"
# Options of docker run. Default: --gpus all --ipc host. For InfiniBand add its devices and the right
# to lock memory.
# : "${BURST_DOCKER_OPTIONS:=--gpus all --ipc host --device /dev/infiniband --ulimit memlock=-1}"

# ---- nodes without a scheduler: launch_nodes.sh, check_nodes.sh --------------------------------------
# : "${BURST_NODES:=node1 node2}"
# How to reach them; it must not ask for anything. Default: ssh that gives up on a dead connection.
# : "${BURST_SSH:=ssh -o BatchMode=yes}"
# Where the ranks meet: address of the first node (default: its name) and port (default: random).
# : "${BURST_MASTER:=10.0.0.1}" "${BURST_PORT:=29500}"

# ---- Slurm: launch.slurm ----------------------------------------------------------------------------
# sbatch itself reads these. Most clusters want GPUs to be asked for even where a job has whole nodes.
# : "${SBATCH_PARTITION:=gpu}" "${SBATCH_ACCOUNT:=mine}" "${SBATCH_TIMELIMIT:=4:00:00}"
# : "${SBATCH_GPUS_PER_NODE:=8}"
# More options of srun.
# : "${BURST_SRUN_OPTIONS:=--gpus-per-node=8}"
# How many times a job whose node or rank died goes back into the queue. Default: 3. When a chain
# (--chain) saves: seconds before the time limit.
# : "${BURST_REQUEUES:=3}" "${SBATCH_SIGNAL:=B:USR1@300}"

# ---- network --------------------------------------------------------------------------------------------
# The device for meeting, for gloo, and for NCCL where there is no InfiniBand. Default: the one by
# which the first node is reached, found on every node by itself. Set it if that is the slow
# management network; to NCCL a name's beginning (eth) means all such devices, =eth0 that one.
# : "${NCCL_SOCKET_IFNAME:==eth0}" "${GLOO_SOCKET_IFNAME:=eth0}"
# The InfiniBand or RoCE NICs for NCCL. Default: all active ports of the highest rate, so that a NIC
# for storage is not used.
# : "${NCCL_IB_HCA:==mlx5_0:1,mlx5_1:1}"
# RoCE only: which address of the card. NCCL finds RoCE v2 by itself since 2.21; older ones need 3 on
# most sites (show_gids lists them).
# : "${NCCL_IB_GID_INDEX:=3}"
# Where NCCL hangs or is slow: INFO says which network and NICs it took.
# : "${NCCL_DEBUG:=WARN}"
# Collectives in the NVLink switch (not the ring) take some 300 MB of each GPU and communicator. 0: none.
# : "${NCCL_NVLS_ENABLE:=0}"

# ---- GPUs -----------------------------------------------------------------------------------------------
# How many requests of a GPU may wait at once. Default: 1, which Megatron asks for on GPUs older than
# Blackwell, so that communication starts before the computation that hides it; with FSDP as CUDA has it.
# : "${CUDA_DEVICE_MAX_CONNECTIONS:=1}"
# Default: expandable_segments:True, but not with --use-nccl-ub or CUDA graphs.
# : "${PYTORCH_CUDA_ALLOC_CONF:=expandable_segments:True}"
