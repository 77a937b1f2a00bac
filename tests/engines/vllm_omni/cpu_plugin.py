"""The entry point of `cpu_platform`, in the group `vllm_omni.platform_plugins`.

`install.sh` writes it into the environment. vLLM-Omni loads it while it is imported itself, so that
nothing of it can be imported here.
"""


def platform() -> str:
    """Return the name of the platform: it is there wherever this package is."""
    return f"{__package__}.cpu_platform.CpuOmniPlatform"
