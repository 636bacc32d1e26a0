"""Where a command line is to run: on this machine, or on a cluster that options describe."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """The machines of a job.

    Attributes:
        nodes: how many.
        ranks_per_node: how many processes, one a GPU, each starts.
        capability: the compute capability of a cluster's GPUs; None: this machine is meant.
        device: of the tensors of attention.
    """

    nodes: int
    ranks_per_node: int
    capability: tuple[int, int] | None
    device: str

    @property
    def ranks(self) -> int:
        """The processes of the job."""
        return self.nodes * self.ranks_per_node

    @property
    def is_cluster(self) -> bool:
        """Whether options describe machines that are not this one."""
        return self.capability is not None

    def __str__(self) -> str:
        ranks = f"{self.nodes} x {self.ranks_per_node} ranks"
        if self.capability is None:
            return f"on this machine ({self.device}): {ranks}"
        major, minor = self.capability
        return f"for the cluster: {ranks}, GPUs of compute capability {major}.{minor}"
