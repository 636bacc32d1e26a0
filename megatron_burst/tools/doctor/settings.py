"""Variables of the environment that NCCL, torch and CUDA obey, and those that harm a ring."""

from collections.abc import Mapping

from megatron_burst.tools.doctor.finding import Finding, Level

_PREFIXES = ("NCCL_", "TORCH_NCCL_", "NVTE_", "GLOO_", "CUDA_", "CUBLAS_", "MEGATRON_BURST_")
_EXACT = ("OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "MASTER_ADDR")
_SLOW = {
    "NCCL_P2P_DISABLE": "messages between GPUs of a node go through the host's memory",
    "NCCL_SHM_DISABLE": "messages between GPUs of a node go through the network",
    "NCCL_IB_DISABLE": "messages between nodes go over TCP sockets",
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel, so nothing overlaps",
}


def shown(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter, sorted."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if name.startswith(_PREFIXES) or name in _EXACT
    }


def findings(environment: Mapping[str, str]) -> list[Finding]:
    """Say what is set against a run's interest."""
    found = [
        Finding("slow-links", Level.WARNING, f"{name}={environment[name]}: {why}", f"unset {name}")
        for name, why in _SLOW.items()
        if environment.get(name, "0") not in ("0", "")
    ]
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if environment.get(name) == "0":
            text = f"{name}=0: torch ends no job whose rank is lost or stalls"
            found.append(Finding("stalls-unseen", Level.WARNING, text, f"unset {name}"))
    return found


def timeout_findings(environment: Mapping[str, str], minutes: int) -> list[Finding]:
    """Compare the time limit of messages with the monitors that may end the process earlier."""
    heartbeat = environment.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "")
    if heartbeat.isdigit() and 0 < int(heartbeat) < 60 * minutes:
        text = (
            f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={heartbeat} ends the process before the time limit "
            f"of {60 * minutes} s, and without the name of the message that stalls"
        )
        remedy = f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={120 * minutes}"
        return [Finding("timeouts", Level.WARNING, text, remedy)]
    text = f"a message that takes longer than {minutes} minutes ends the job"
    return [Finding("timeouts", Level.NOTE, text, "--distributed-timeout-minutes")]
