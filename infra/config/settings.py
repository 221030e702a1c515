"""Facts of the machine, from the environment; never part of a round."""

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from infra.config.base import Address
from infra.errors import ConfigError


class Settings(BaseSettings):
    """Where this machine keeps things and which ports it uses (environment: ``EAGLE3_<FIELD>``; empty is unset).

    Relative paths begin at this process's working folder, and are absolute from here on: others have another one.

    Raises:
        ConfigError: a variable cannot be used; every one is named.
    """

    model_config = SettingsConfigDict(env_prefix="EAGLE3_", extra="ignore", env_ignore_empty=True)

    cache_dir: Path = Field(
        default_factory=lambda: Path.home() / ".cache" / "eagle3",
        description="Environments and downloads; safe to delete, rebuilt when missing.",
    )
    state_dir: Path = Field(
        default_factory=lambda: Path.home() / ".local" / "state" / "eagle3",
        description="Prefect's home, store, models, scratch, logs and pid files.",
    )
    store_url: Address = Field(default="", description="fsspec URL of the store; empty means <state_dir>/store.")
    store_block: str = Field(
        default="",
        description="Name of a Prefect Secret block with the store's AWS_* credentials; empty: the environment's.",
    )
    models_path: Path | None = Field(default=None, description="Folder of targets; empty means <state_dir>/models.")
    scratch_path: Path | None = Field(
        default=None, description="Folder for staging and journals; empty means <state_dir>/scratch."
    )
    api_port: int = Field(
        default=4217, ge=1, le=65535, description="Port of the Prefect server that `eagle3 up` starts."
    )
    gpus_alone: bool = Field(
        default=False,
        description="In a container: nothing outside it uses its GPUs; memory without a process is lost memory.",
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            faults = "; ".join(f"EAGLE3_{str(fault['loc'][0]).upper()}: {fault['msg']}" for fault in error.errors())
            raise ConfigError(
                f"this machine's settings cannot be used: {faults}",
                fix="correct these environment variables, or unset them",
            ) from error

    @field_validator("cache_dir", "state_dir", "models_path", "scratch_path")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return None if path is None else path.absolute()

    @field_validator("store_url")
    @classmethod
    def _absolute_folder(cls, url: str) -> str:
        kind, slashes, place = url.rpartition("://")
        if url and (not place.strip("/") or (not slashes and ":" in url.partition("/")[0])):
            raise ValueError("neither a path nor a URL such as file:///folder or s3://bucket/prefix")
        if not url or (slashes and kind != "file"):
            return url
        return f"file://{Path(url.removeprefix('file://')).absolute()}"

    @property
    def store(self) -> str:
        """URL of the store."""
        return self.store_url or f"file://{self.state_dir / 'store'}"

    @property
    def models_dir(self) -> Path:
        """Folder that holds one subfolder a target."""
        return self.models_path or self.state_dir / "models"

    @property
    def scratch_dir(self) -> Path:
        """Folder for everything that may be deleted when nothing runs."""
        return self.scratch_path or self.state_dir / "scratch"

    @property
    def run_dir(self) -> Path:
        """Folder of pid files."""
        return self.state_dir / "run"

    @property
    def log_dir(self) -> Path:
        """Folder of process logs."""
        return self.state_dir / "logs"

    @property
    def prefect_home(self) -> Path:
        """PREFECT_HOME of the server and worker that this project starts."""
        return self.state_dir / "prefect"
