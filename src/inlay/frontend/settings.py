"""Settings of the HTTP side: the flags, environment variables and config keys of a frontend."""

from pydantic import BaseModel, ConfigDict, Field

MIB = 1024 * 1024


class FrontendSettings(BaseModel):
    """Who may ask, for what, and how much at a time. Names are vLLM's where vLLM has one."""

    model_config = ConfigDict(frozen=True)

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    api_key: list[str] = Field(
        default=[], description="Keys clients may use; none means no key is asked for."
    )
    enable_prompt_embeds: bool = Field(default=False, description="Accept embeddings as prompts.")
    max_prompt_embeds_bytes: int = Field(
        default=10 * MIB, ge=100, description="Decoded container bytes of one embeddings prompt at most."
    )
    max_body_bytes: int = Field(default=64 * MIB, ge=1024, description="Bytes of a request body at most.")
    max_inflight_bytes: int = Field(
        default=256 * MIB, ge=MIB, description="Body bytes held at a time for all requests together."
    )
    max_inflight_requests: int = Field(default=1024, ge=1, description="Requests under way at a time.")
    body_timeout: float = Field(
        default=30.0, gt=0, description="Seconds a body may go without a byte arriving."
    )
    drain_timeout: float = Field(
        default=5.0, ge=0, description="Seconds open requests get to end after SIGTERM or Ctrl-C."
    )
    max_choices: int = Field(
        default=128, ge=1, description="Choices one request may ask for, over all its prompts."
    )
    chat_template: str | None = Field(
        default=None, description="File of a chat template instead of the model's own."
    )
    share_prefix_cache: bool = Field(
        default=False,
        description="Let the holders of different API keys share cached prefixes. Apart unless set: what is cached "
        "would tell one what another asked.",
    )
    root_path: str = Field(default="", description="Path prefix a proxy in front strips.")
