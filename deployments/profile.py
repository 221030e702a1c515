"""The Prefect profile that makes a plain ``prefect`` in a fresh shell find our server."""

from pathlib import Path

from pydantic import BaseModel

from infra.errors import ConfigError

NAME = "eagle3"
# The profile Prefect uses where no profiles file says otherwise.
UNSET = "ephemeral"


class Earlier(BaseModel):
    """What the user's profiles file was before ours was activated."""

    file: Path
    active: str | None
    existed: bool


def check() -> None:
    """See that the user's profiles file can be read, before anything is started that needs it.

    Raises:
        ConfigError: it cannot.
    """
    from prefect.settings import PREFECT_PROFILES_PATH, load_profiles

    try:
        load_profiles()
    except ValueError as error:
        raise ConfigError(
            f"Prefect's profiles in {PREFECT_PROFILES_PATH.value()} cannot be read: {error}",
            fix="correct that file, or move it away",
        ) from error


def activate(api: str) -> Earlier:
    """Write profile ``eagle3`` with ``PREFECT_API_URL = api`` into the user's profiles file and make it active."""
    from prefect.settings import PREFECT_PROFILES_PATH, Profile, load_profiles, save_profiles

    file = Path(PREFECT_PROFILES_PATH.value())
    existed = file.exists()
    profiles = load_profiles()
    active = profiles.active_name
    ours = Profile.model_validate({"name": NAME, "settings": {"PREFECT_API_URL": api}, "source": file})
    if NAME in profiles.names:
        profiles.remove_profile(NAME)
    profiles.add_profile(ours)
    profiles.set_active(NAME)
    save_profiles(profiles)
    return Earlier(file=file, active=None if active == NAME else active, existed=existed)


def restore(earlier: Earlier) -> None:
    """Take our profile away; the earlier one becomes active again unless the user has chosen another meanwhile."""
    from prefect.settings import PREFECT_PROFILES_PATH, load_profiles, save_profiles, temporary_settings

    if not earlier.file.exists():
        return
    with temporary_settings({PREFECT_PROFILES_PATH: earlier.file}):
        profiles = load_profiles()
        untouched = profiles.active_name == NAME
        if untouched:
            profiles.set_active(earlier.active if earlier.active in profiles.names else UNSET)
        if NAME in profiles.names:
            profiles.remove_profile(NAME)
        save_profiles(profiles)
        if untouched and not earlier.existed and not load_profiles(include_defaults=False).names:
            earlier.file.unlink()
