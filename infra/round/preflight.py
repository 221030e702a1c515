"""What a round needs and this machine lacks, each in one plain sentence."""

import sys

import torch

from infra.config.round import RoundConfig
from infra.config.settings import Settings
from infra.data.template import Chat
from infra.engines.registry import find_engine
from infra.environments.building import environment_python
from infra.errors import ConfigError, EngineError, EnvironmentBuildError, MissingTarget
from infra.machine.gpus.readings import GpuReport
from infra.machine.network import network_faults
from infra.round.checks import refusals
from infra.store.objects import ObjectStore
from infra.store.probe import store_faults
from infra.targets.target import open_target


def faults(config: RoundConfig, settings: Settings, gpus: GpuReport, serves: bool = True) -> list[str]:
    """Everything that would stop the round later, found now; empty when the machine is fit.

    Args:
        serves: whether drafts will be served; False where hidden states are all that is wanted.
    """
    return [
        *network_faults(),
        *map(str, store_faults(ObjectStore(settings.store))),
        *_target_faults(config, settings),
        *refusals(config, settings, serves),
        *_engine_faults(config, settings),
        *machine_faults(config, gpus, serves),
    ]


def machine_faults(config: RoundConfig, gpus: GpuReport, serves: bool = True) -> list[str]:
    """What this machine lacks that nothing here can fetch or build."""
    return [*_gpu_faults(config, gpus), *(_trainer_faults(config) if serves else ())]


def _target_faults(config: RoundConfig, settings: Settings) -> list[str]:
    try:
        target = open_target(config.target, settings.models_dir)
    except MissingTarget as error:
        return [str(error)]
    except ConfigError:
        return []  # the checks say so
    try:
        Chat(target)
    except (MissingTarget, ConfigError) as error:
        return [str(error)]
    return []


def _engine_faults(config: RoundConfig, settings: Settings) -> list[str]:
    found = []
    for engine in config.used_engines:
        try:
            find_engine(engine)
            environment_python(f"{engine}-{config.engines[engine].device}", settings.cache_dir)
        except (EngineError, EnvironmentBuildError) as error:
            found.append(str(error))
    return found


def _gpu_faults(config: RoundConfig, report: GpuReport) -> list[str]:
    found = []
    for name in config.used_engines:
        engine = config.engines[name]
        if engine.device != "cuda":
            continue
        if len(report.gpus) < engine.tensor_parallel:
            found.append(
                f"{name} needs {engine.tensor_parallel} GPUs and this machine has {len(report.gpus)}"
                + (f" ({report.reason})" if not report.present else "")
            )
    trains_on_gpus = config.engines[config.extract.engine].device == "cuda"
    if trains_on_gpus and len(report.gpus) < config.train.devices:
        found.append(f"training wants {config.train.devices} GPUs and this machine has {len(report.gpus)}")
    return found


def _trainer_faults(config: RoundConfig) -> list[str]:
    """The trainer runs in this process's environment, and its device is the extracting engine's."""
    if config.engines[config.extract.engine].device == "cpu" or torch.backends.cuda.is_built():
        return []
    return [
        f"training on GPUs needs a torch with CUDA, and the one of flows ({sys.prefix}) is {torch.__version__}: "
        "`eagle3 engines install flows-cuda`, export EAGLE3_FLOWS=flows-cuda, then `eagle3 down` and `eagle3 up`"
    ]
