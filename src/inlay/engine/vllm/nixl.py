"""vLLM's NixlConnector, which uses no block that was read after its lease could have ended.

vLLM imports it by `kv_connector_module_path`. It keeps vLLM's name for it, as vLLM checks by that
name what does not go with it.
"""

import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector as VllmNixlConnector
from vllm.logger import init_logger
from vllm.utils.network_utils import make_zmq_path

from inlay.engine.vllm.leases import KvLease, Leases

log = init_logger(__name__)


class NixlConnector(VllmNixlConnector):  # type: ignore[misc]
    """A connector whose prefill side says when a lease ends, and whose decode side heeds it."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._leases = Leases()

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's; what is kept comes with the end of its lease, by this process's clock."""
        begun = time.perf_counter()
        kept, said = super().request_finished_all_groups(request, block_ids)
        if kept and said is not None:
            seconds = self.kv_transfer_config.get_from_extra_config("kv_lease_duration", 30)
            said["remote_blocks_expiry_time"] = begun + seconds
        return kept, said

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """As vLLM's; notes the leases."""
        for request_id, meta in self._get_connector_metadata().reqs_to_recv.items():
            remote = meta.remote
            address = make_zmq_path("tcp", remote.host, remote.port)
            until = remote.blocks_expiry_time or 0.0
            if meta.awaiting_kvs:
                self._leases.begin(request_id, KvLease(remote.engine_id, address, until))
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """As vLLM's; what has come is received once it is known whether that was in time."""
        found = super().get_transfer_results(finished_req_ids)
        for request_id in found.failed_recving:
            self._leases.forget(request_id)
        in_time, late = self._leases.settled(found.finished_recving - found.failed_recving)
        for request_id in late:
            log.warning(
                "The blocks of request %s were read after their lease could have ended: it is "
                "computed here",
                request_id,
            )
        return KVConnectorTransferResults(
            finished_sending=found.finished_sending,
            finished_recving=found.failed_recving | in_time | late,
            failed_recving=found.failed_recving | late,
        )

    def shutdown(self) -> None:
        """As vLLM's."""
        super().shutdown()
        self._leases.close()
