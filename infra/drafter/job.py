"""One training: what is trained, in which folder, and the command line of the trainer's process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infra.config.round import TargetShape
from infra.config.training import TrainConfig
from infra.drafter.checkpoint import DraftShape
from infra.drafter.dataset import BACKEND, DatasetFacts
from infra.drafter.start import Start
from infra.targets.target import Target

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class TrainJob:
    """One training.

    Args:
        config: the draft and how it is trained.
        target: the model it is for.
        device: what it trains on.
        taps: taps stored in the hidden states and fed to the draft, ascending, without L.
        states_url: the store's URL.
        states_prefix: path of the hidden states in the store; row numbers are the samples'.
        draft_vocab_size: tokens the draft can propose; None for all.
        workdir: folder of this training, kept between attempts: an attempt goes on where the last one was killed.
        free_bytes: room that a checkpoint must leave on the file system of ``workdir``; it waits for it.
        visible: GPUs to use, as CUDA_VISIBLE_DEVICES names them; empty for whatever this process sees.
        start: draft to start from; None to start anew.
    """

    config: TrainConfig
    target: Target
    device: Literal["cpu", "cuda"]
    taps: tuple[int, ...]
    states_url: str
    states_prefix: str
    draft_vocab_size: int | None
    workdir: Path
    free_bytes: int = 0
    visible: tuple[str, ...] = ()
    start: Start | None = None

    @property
    def checkpoints(self) -> Path:
        """Folder of the trainer's checkpoints."""
        return self.workdir / "checkpoints"

    @property
    def verifier(self) -> Path:
        """Folder that the trainer opens as its target (:mod:`infra.drafter.verifier`)."""
        return self.workdir / "verifier"

    @property
    def begun_with(self) -> Path:
        """Folder of the draft to start from, as the trainer loads it (:func:`infra.drafter.start.write_start`)."""
        return self.workdir / "start"

    @property
    def dataset(self) -> Path:
        """Folder of the trainer's dataset."""
        return self.workdir / "dataset"

    @property
    def events(self) -> Path:
        """The trainer's JSON lines."""
        return self.workdir / "events.jsonl"

    @property
    def log(self) -> Path:
        """The trainer's output."""
        return self.workdir / "trainer.log"

    @property
    def shape(self) -> DraftShape:
        """What the draft must look like."""
        return draft_shape(self.config, self.taps, self.draft_vocab_size, self.target.shape)


def draft_shape(
    config: TrainConfig, taps: tuple[int, ...], draft_vocab_size: int | None, target: TargetShape
) -> DraftShape:
    """What a draft for a target must look like."""
    whole = target.vocab_size
    return DraftShape(
        taps=taps,
        layers=config.layers,
        hidden_size=target.hidden_size,
        vocab_size=whole,
        draft_vocab_size=draft_vocab_size if draft_vocab_size is not None and draft_vocab_size < whole else None,
        norm_before_fc=config.norm_before_fc,
        norm_output=config.norm_output,
    )


def trainer_command(job: TrainJob, facts: DatasetFacts, python: Path) -> tuple[str, ...]:
    """The command line of the trainer's process."""
    launcher: tuple[str, ...] = ("-m",)
    if (devices := job.config.devices) > 1:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices), "-m")
    arguments = (*trainer_arguments(job, facts.ratio), *job.config.extra_args)
    return (str(python), *launcher, "infra.drafter.trainer_entry", *arguments)


def trainer_arguments(job: TrainJob, ratio: float) -> tuple[str, ...]:
    """What :mod:`infra.drafter.trainer_entry` is told, but for the round's own ``train.extra_args``.

    Args:
        ratio: share of the dataset's samples that are trained on.
    """
    config, size = job.config, job.shape.draft_vocab_size
    layers = tuple(str(layer) for layer in range(config.layers))
    # Full attention is what both vLLM and SGLang can serve. A draft to start from has its layers itself.
    decoder = ("--draft-arch", "llama", "--num-layers", str(config.layers), "--full-attention-indices", *layers)
    return (
        *("--events", str(job.events), "--device", job.device, "--free-bytes", str(job.free_bytes)),
        *("--speculator-type", "eagle3", "--verifier-name-or-path", str(job.verifier)),
        *("--data-path", str(job.dataset), "--save-path", str(job.checkpoints), "--log-dir", str(job.workdir / "logs")),
        *("--hidden-states-backend", BACKEND, "--states-url", job.states_url, "--states-prefix", job.states_prefix),
        *("--on-missing", "raise", "--train-data-ratio", repr(ratio)),
        *("--target-layer-ids", *(str(tap) for tap in job.taps)),
        *(decoder if job.start is None else ("--from-pretrained", str(job.begun_with))),
        "--no-norm-before-residual",  # both engines can serve this order
        "--norm-before-fc" if config.norm_before_fc else "--no-norm-before-fc",
        "--norm-output" if config.norm_output else "--no-norm-output",
        # EAGLE-3 masks nothing; without an id the trainer would load the target's tokenizer to find one.
        *("--mask-token-id", "0"),
        *(("--draft-vocab-size", str(size)) if size is not None else ()),
        *("--total-seq-len", str(config.sequence_tokens), "--ttt-steps", str(config.draft_steps)),
        *("--optimizer", config.optimizer, "--lr", repr(config.learning_rate)),
        *("--scheduler-type", config.scheduler, "--scheduler-warmup-ratio", repr(config.warmup)),
        *("--epochs", str(config.epochs), *(("--max-steps", str(config.max_steps)) if config.max_steps else ())),
        *("--checkpoint-freq", repr(1 / config.checkpoints_per_epoch), "--seed", str(config.seed), "--log-freq", "1"),
        *(CPU_ARGUMENTS if job.device == "cpu" else CUDA_ARGUMENTS),
    )


# In the trainer's own process the loader reads mapped files; worker processes would take cores from the steps.
# float32, because CPUs without bf16 arithmetic convert every operand.
CPU_ARGUMENTS = (
    *("--draft-attn-impl", "sdpa", "--loss-implementation", "eager"),
    *("--hidden-states-dtype", "float32", "--num-workers", "0"),
)
CUDA_ARGUMENTS = ("--hidden-states-dtype", "bfloat16", "--num-workers", "4")
