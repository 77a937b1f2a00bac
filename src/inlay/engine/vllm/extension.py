"""Methods that inlay adds to vLLM's worker processes.

VLLM mixes it into its own worker class (`--worker-extension-cls`).
"""

from typing import Any

from torch import nn
from vllm.distributed.kv_transfer import get_kv_transfer_group

from inlay.engine.vllm import nan_guard


class WorkerExtension:
    """Calls that `AsyncLLM.collective_rpc` makes by name."""

    model_runner: Any

    def guard_against_nan(self) -> None:
        """Report NaN by request from now on, with drafts too, and overwrite what it left."""
        nan_guard.guard(self.model_runner)

    def overwrite_not_finite(self) -> int:
        """Put zeros where keys and values are NaN or infinite, between two steps.

        The number of layers looked at.
        """
        return nan_guard.overwrite_not_finite(self.model_runner.kv_caches)

    def let_go(self, name: str) -> bool:
        """End the lease of blocks that are kept for another worker.

        `name` is that of the request that computed them. True if there are any.
        """
        # By what vLLM 0.32 calls it: it has no way to end one before its time.
        leases = get_kv_transfer_group().connector_worker._reqs_to_send
        found = [id_ for id_ in leases if id_.rpartition("-")[0] == name]
        for id_ in found:
            leases[id_] = 0.0
        return bool(found)

    def dense_layers(self) -> int:
        """Linear layers of the pooler.

        VLLM only writes a line of its log where those of the model's files cannot be read.
        """
        pooler = getattr(self.model_runner.model, "pooler", None)
        return (
            0 if pooler is None else sum(isinstance(layer, nn.Linear) for layer in pooler.modules())
        )
