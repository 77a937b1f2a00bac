"""From a `Sampling` to SGLang's sampling parameters. No SGLang: it takes a dictionary."""

from typing import Any

from inlay.messages.fields import FOR_SGLANG
from inlay.messages.request import Request


def params_of(request: Request, *, seeded: bool) -> dict[str, Any]:
    """SGLang's parameters for choosing the tokens of `request`.

    What ends an output is `SglangRequestTracker`'s to find: SGLang looks for no stop tokens where
    it ignores the model's own end.

    Args:
        request: checked.
        seeded: SGLang draws from seeds.
    """
    sampling = request.sampling
    return {
        "max_new_tokens": sampling.max_tokens - len(request.prior_output),
        **{theirs: getattr(sampling, name) for theirs, name in FOR_SGLANG},
        "top_k": sampling.top_k or -1,
        "logit_bias": {str(id_): bias for id_, bias in sampling.logit_bias.items()} or None,
        "sampling_seed": sampling.seed if seeded else None,
        "ignore_eos": True,
    }
