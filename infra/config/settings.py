"""Facts of the machine, from the environment; never part of a round."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Where this machine keeps things and which ports it uses (environment: ``EAGLE3_<FIELD>``)."""

    model_config = SettingsConfigDict(env_prefix="EAGLE3_", extra="ignore")

    cache_dir: Path = Field(
        default_factory=lambda: Path.home() / ".cache" / "eagle3",
        description="Environments and downloads; safe to delete, rebuilt when missing.",
    )
    state_dir: Path = Field(
        default_factory=lambda: Path.home() / ".local" / "state" / "eagle3",
        description="Prefect's home, store, models, scratch, logs and pid files.",
    )
    store_url: str = Field(default="", description="fsspec URL of the store; empty means <state_dir>/store.")
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
