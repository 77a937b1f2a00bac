"""Settings all tests share."""

import httpx
from hypothesis import HealthCheck, settings

settings.register_profile(
    "inlay",
    derandomize=True,
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("inlay")

# httpx gives up after five seconds unless it is told otherwise; a busy machine is no fault of what
# is tested.
for part in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, part, 180.0)
