"""Rounds from YAML, overrides, step keys, and what a target's folder says."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from infra.config.keys import decisive, key12
from infra.config.load import ROUNDS, build_round, load_round, round_file
from infra.config.round import GenerateConfig, RoundConfig, Strict, TargetConfig
from infra.config.settings import Settings
from infra.config.training import TrainConfig
from infra.errors import ConfigError, MissingTarget
from infra.targets.target import open_target, read_shape, target_revision, weight_files

SHIPPED = sorted(ROUNDS.glob("*.yaml"))


def raw(**changes: Any) -> dict[str, Any]:
    """The least that makes a round."""
    return {
        "name": "mine",
        "target": {"name": "Small-1"},
        "extract": {"taps": [2, 15, 27]},
        "engines": {"vllm": {"device": "cpu"}},
    } | changes


def target_folder(parent: Path, name: str = "Small-1", **config: Any) -> Path:
    """A target with a config.json and one safetensors file of 8 bytes of weights."""
    folder = parent / name
    folder.mkdir(parents=True)
    fields = {"num_hidden_layers": 30, "hidden_size": 576, "vocab_size": 49152, "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(fields | config))
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    return folder


class TestRounds:
    @pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
    def test_every_shipped_round_is_valid_and_named_like_its_file(self, file: Path) -> None:
        assert load_round(file).name == file.stem
        assert round_file(file.stem) == file

    def test_round2_tells_the_story(self) -> None:
        config = load_round(round_file("round2"))
        serving = config.engines["sglang"]
        assert config.extract.taps == (3, 31, 59)
        assert config.target.shape is not None
        assert config.target.shape.layers == 61
        assert config.prompts.count == 15000
        assert serving.tensor_parallel == 8
        assert [rung.name for rung in serving.ladder] == ["flashinfer", "triton"]
        for rung in serving.ladder:
            assert rung.env["NCCL_PROTO"] == "LL"
            assert rung.env["NCCL_BUFFSIZE"] == "16777216"
            assert rung.flags[-2:] == ("--num-continuous-decode-steps", "4")
        assert config.budget.disk_bytes

    def test_survives_the_trip_through_json(self) -> None:
        config = load_round(round_file("smoke"))
        assert RoundConfig.model_validate(config.model_dump(mode="json")) == config

    def test_a_round_cannot_be_changed(self) -> None:
        with pytest.raises(ValueError, match="frozen"):
            build_round(raw()).name = "other"

    def test_every_field_is_described(self) -> None:
        bare = [
            f"{model.__name__}.{name}"
            for model in Strict.__subclasses__()
            for name, field in model.model_fields.items()
            if not field.description
        ]
        assert RoundConfig in Strict.__subclasses__()
        assert bare == []

    @pytest.mark.parametrize(
        ("changes", "fault"),
        [
            ({"colour": "red"}, "colour"),
            ({"name": "Not A Name"}, "name"),
            ({"target": {"name": "../etc"}}, "target.name"),
            ({"extract": {"taps": []}}, "extract.taps"),
            ({"extract": {"taps": [15, 2, 27]}}, "ascending"),
            ({"extract": {"taps": [2, 2, 27]}}, "different"),
            ({"extract": {"taps": [-1, 2]}}, "not negative"),
            ({"extract": {"engine": "sglang", "taps": [2]}}, "engine 'sglang'"),
            ({"serve_with": "sglang"}, "engine 'sglang'"),
            ({"engines": {"llama.cpp": {}}}, "engines.llama.cpp"),
            ({"prepare": {"max_tokens": 8192}}, "prepare.max_tokens (8192)"),
            ({"prepare": {"heldout": 0}}, "prepare.heldout"),
            ({"generate": {"max_tokens": 4000}}, "generate: max_prompt_tokens + max_tokens = 5024"),
            ({"evaluate": {"max_tokens": 3500}}, "evaluate: max_prompt_tokens + max_tokens = 4524"),
            ({"generate": {"temperature": "warm"}}, "generate.temperature"),
            ({"generate": {"further_temperatures": [0]}}, "one answer at temperature 0 is enough"),
            ({"generate": {"further_temperatures": [3]}}, "generate.further_temperatures.0"),
            ({"generate": {"answers": "given", "further_temperatures": [1]}}, "needs `answers: target`"),
            (
                {"generate": {"temperature": 1, "top_k": 9, "further_temperatures": [0]}},
                "top_k and min_p choose among tokens that are sampled",
            ),
            ({"train": {"learning_rate": 0}}, "train.learning_rate"),
            ({"evaluate": {"concurrencies": []}}, "evaluate.concurrencies"),
        ],
    )
    def test_a_wrong_round_is_refused_and_the_fault_named(self, changes: dict[str, Any], fault: str) -> None:
        with pytest.raises(ConfigError) as caught:
            build_round(raw(**changes))
        assert fault in str(caught.value)

    def test_every_fault_is_named_at_once(self) -> None:
        with pytest.raises(ConfigError) as caught:
            build_round(raw(colour="red", name="Not A Name"))
        assert "colour" in str(caught.value)
        assert "name" in str(caught.value)

    def test_the_last_tap_must_lie_below_the_last_layer(self) -> None:
        shape = {"layers": 30, "hidden_size": 576, "vocab_size": 49152, "weight_bytes": 1, "family": "llama"}
        target = {"name": "Small-1", "shape": shape}
        assert build_round(raw(target=target, extract={"taps": [2, 15, 29]})).extract.taps[-1] == 29
        with pytest.raises(ConfigError, match="tap 30 does not exist in a target of 30 layers"):
            build_round(raw(target=target, extract={"taps": [2, 15, 30]}))


class TestOverrides:
    def test_are_merged_and_the_rest_stays(self) -> None:
        config = load_round(round_file("smoke"), {"train.epochs": 7, "engines.vllm.max_model_len": 2048})
        plain = load_round(round_file("smoke"))
        assert config.train.epochs == 7
        assert config.engines["vllm"].max_model_len == 2048
        assert config.train.sequence_tokens == plain.train.sequence_tokens
        assert config.generate == plain.generate

    def test_reach_groups_that_the_file_leaves_out(self) -> None:
        assert build_round(raw(), {"budget.hours": 2.5}).budget.hours == 2.5

    def test_leave_what_they_are_merged_into_alone(self) -> None:
        fields = raw()
        build_round(fields, {"extract.taps": [1, 2]})
        assert fields["extract"]["taps"] == [2, 15, 27]

    @pytest.mark.parametrize(
        ("overrides", "fault"),
        [
            ({"train.epoch": 2}, "train.epoch"),
            ({"train.epochs": 0}, "train.epochs"),
            ({"name.first": "x"}, "goes through 'name'"),
            ({"target.name.first": "x"}, "goes through 'name'"),
            ({"extract.engine": "sglang"}, "sglang"),
        ],
    )
    def test_wrong_ones_are_refused(self, overrides: dict[str, Any], fault: str) -> None:
        with pytest.raises(ConfigError) as caught:
            build_round(raw(), overrides)
        assert fault in str(caught.value)


class TestFiles:
    def test_unknown_round_lists_those_there_are(self) -> None:
        with pytest.raises(ConfigError, match="smoke"):
            round_file("nothing-like-it")

    def test_a_path_is_taken_as_it_is(self, tmp_path: Path) -> None:
        path = tmp_path / "own.yaml"
        with pytest.raises(ConfigError, match="there is no round"):
            round_file(str(path))
        path.write_text(json.dumps(raw()))
        assert load_round(round_file(str(path))).name == "mine"

    @pytest.mark.parametrize(
        ("text", "fault"), [("a: [1", "is not YAML"), ("- 1", "holds list"), ("", "holds NoneType")]
    )
    def test_what_is_no_mapping_is_refused(self, tmp_path: Path, text: str, fault: str) -> None:
        path = tmp_path / "own.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=fault):
            load_round(path)


class TestKeys:
    def test_are_twelve_hex_digits_and_known(self) -> None:
        # Pinned to sha256 of {"a":1,"b":[2,"x"]}: another canonical form would redo every step of every store.
        assert key12(a=1, b=[2, "x"]) == key12(b=[2, "x"], a=1) == "454597f51f0e"

    def test_knobs_do_not_count(self) -> None:
        assert key12(c=GenerateConfig(concurrency=1)) == key12(c=GenerateConfig(concurrency=99, timeout_seconds=5))
        assert key12(c=TrainConfig()) == key12(c=TrainConfig(compile=False, checkpoints_per_epoch=3))

    def test_knobs_inside_a_round_do_not_count_either(self) -> None:
        ladder = [{"name": "eager", "flags": ["--enforce-eager"]}]
        plain = build_round(raw())
        assert key12(c=plain) == key12(c=build_round(raw(extract={"taps": [2, 15, 27], "concurrency": 3})))
        assert decisive(plain)["extract"]["taps"] == [2, 15, 27]
        assert "concurrency" not in decisive(plain)["extract"]
        fast = build_round(raw(engines={"vllm": {"device": "cpu", "ladder": ladder}}))
        assert key12(c=plain.engines["vllm"]) == key12(c=fast.engines["vllm"])

    @pytest.mark.parametrize(
        "changed",
        [
            GenerateConfig(max_tokens=255),
            GenerateConfig(temperature=0.7),
            GenerateConfig(seed=1),
            GenerateConfig(answers="given"),
        ],
    )
    def test_everything_else_counts(self, changed: GenerateConfig) -> None:
        assert key12(c=changed) != key12(c=GenerateConfig())

    def test_names_of_inputs_count(self) -> None:
        assert key12(a=1) != key12(b=1)

    def test_what_has_no_canonical_form_is_refused(self) -> None:
        with pytest.raises(TypeError, match="object"):
            key12(a=object())


class TestTarget:
    def test_opens(self, tmp_path: Path) -> None:
        folder = target_folder(tmp_path)
        target = open_target(TargetConfig(name="Small-1"), tmp_path)
        assert (target.path, target.shape.layers, target.shape.hidden_size) == (folder, 30, 576)
        assert target.shape.weight_bytes == (folder / "model.safetensors").stat().st_size
        assert len(target.revision) == 16

    def test_missing_says_what_fetches_it(self, tmp_path: Path) -> None:
        with pytest.raises(MissingTarget, match="eagle3 target fetch Small-1"):
            open_target(TargetConfig(name="Small-1", source="hf://org/Small-1"), tmp_path)
        with pytest.raises(MissingTarget, match="put the model's files into"):
            open_target(TargetConfig(name="Small-1"), tmp_path)

    def test_without_weights_is_missing(self, tmp_path: Path) -> None:
        (target_folder(tmp_path) / "model.safetensors").unlink()
        with pytest.raises(MissingTarget, match=r"no \*\.safetensors"):
            open_target(TargetConfig(name="Small-1"), tmp_path)

    def test_shape_of_a_multimodal_target_is_its_text_part(self, tmp_path: Path) -> None:
        text = {"num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840, "model_type": "deepseek_v3"}
        shape = read_shape(target_folder(tmp_path, text_config=text))
        assert (shape.layers, shape.hidden_size, shape.family) == (61, 7168, "deepseek_v3")

    def test_unusable_config_is_refused(self, tmp_path: Path) -> None:
        folder = target_folder(tmp_path)
        (folder / "config.json").write_text("{")
        with pytest.raises(ConfigError, match="is not JSON"):
            read_shape(folder)
        (folder / "config.json").write_text('{"hidden_size": 1}')
        with pytest.raises(ConfigError, match="num_hidden_layers"):
            read_shape(folder)

    def test_revision_is_of_the_files_not_of_the_place(self, tmp_path: Path) -> None:
        assert target_revision(target_folder(tmp_path / "a")) == target_revision(target_folder(tmp_path / "b", "Other"))

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
    def test_revision_follows_each_text_file(self, tmp_path: Path, name: str) -> None:
        folder = target_folder(tmp_path)
        before = target_revision(folder)
        path = folder / name
        path.write_text((path.read_text() if path.exists() else "") + " ")
        assert target_revision(folder) != before

    def test_revision_follows_header_and_size_of_the_weights(self, tmp_path: Path) -> None:
        folder = target_folder(tmp_path)
        before = target_revision(folder)
        path = weight_files(folder)[0]
        whole = path.read_bytes()
        path.write_bytes(whole + b"\0")
        longer = target_revision(folder)
        path.write_bytes(whole.replace(b"BF16", b"F16\x20"))
        other_header = target_revision(folder)
        path.write_bytes(whole)
        assert len({before, longer, other_header}) == 3
        assert target_revision(folder) == before


class TestSettings:
    def test_come_from_the_environment(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("EAGLE3_STATE_DIR", str(tmp_path))
        monkeypatch.delenv("EAGLE3_STORE_URL", raising=False)
        monkeypatch.delenv("EAGLE3_MODELS_PATH", raising=False)
        settings = Settings()
        assert settings.store == f"file://{tmp_path}/store"
        assert settings.models_dir == tmp_path / "models"
        monkeypatch.setenv("EAGLE3_STORE_URL", "s3://bucket/drafts")
        assert Settings().store == "s3://bucket/drafts"

    def test_wrong_ports_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EAGLE3_API_PORT", "70000")
        with pytest.raises(ConfigError, match="EAGLE3_API_PORT: .*65535"):
            Settings()

    def test_every_variable_that_cannot_be_used_is_named_and_no_secret_repeated(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("EAGLE3_GPUS_ALONE", "perhaps")
        monkeypatch.setenv("EAGLE3_STORE_URL", "s3://name:geheim@bucket/drafts")
        with pytest.raises(ConfigError, match="EAGLE3_GPUS_ALONE") as raised:
            Settings()
        assert "EAGLE3_STORE_URL: " in str(raised.value)
        assert "geheim" not in str(raised.value)

    @pytest.mark.parametrize("url", ["s3://", "s3:///", "file://", "s3:/bucket/x", "s3:bucket", "file:/folder"])
    def test_half_a_url_is_no_folder_of_that_name(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EAGLE3_STORE_URL", url)
        with pytest.raises(ConfigError, match="EAGLE3_STORE_URL: .*s3://bucket/prefix"):
            Settings()

    def test_relative_places_are_this_working_folders_and_empty_ones_are_unset(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for name, value in {"STATE_DIR": "state", "STORE_URL": "store", "CACHE_DIR": "", "SCRATCH_PATH": ""}.items():
            monkeypatch.setenv(f"EAGLE3_{name}", value)
        settings = Settings()
        assert (settings.run_dir, settings.scratch_dir) == (tmp_path / "state/run", tmp_path / "state/scratch")
        assert settings.store == f"file://{tmp_path}/store"
        assert settings.cache_dir == Path.home() / ".cache" / "eagle3"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff\xfe\x00", "not YAML"),
        (b"[" * 5000, "not YAML"),
        (b"name: a\x00", "not YAML"),
        (b"- a", "holds list"),
        (b"", "holds NoneType"),
    ],
)
def test_a_round_file_of_garbage_is_refused_by_name(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(data)
    with pytest.raises(ConfigError, match=f"mine.yaml .*{said}|mine.yaml {said}"):
        load_round(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("evaluate.concurrencies", [0]),
        ("evaluate.concurrencies", [1, -8]),
        ("train.learning_rate", float("inf")),
        ("budget.pause_seconds", float("inf")),
        ("engines.vllm.ready_seconds", float("nan")),
    ],
)
def test_numbers_that_would_end_a_round_later_are_refused_when_it_is_read(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        build_round(raw(), {field: value})


@pytest.mark.parametrize("field", ["prompts.source", "evaluate.prompts.source", "target.source"])
def test_an_address_with_a_password_is_refused_and_not_repeated(field: str) -> None:
    with pytest.raises(ConfigError, match=field) as raised:
        build_round(raw(), {field: "https://name:geheim@data.example/prompts.jsonl"})
    assert "geheim" not in str(raised.value)
    build_round(raw(), {field: "https://data.example/p:1/prompts@2.jsonl"})


@pytest.mark.parametrize(
    "config",
    ["[]", "null", "\xff", '{"text_config": null}', '{"text_config": []}']
    + [
        json.dumps({"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 9, "model_type": "llama"} | change)
        for change in ({"num_hidden_layers": "x"}, {"num_hidden_layers": 0}, {"hidden_size": None}, {"model_type": 5})
    ],
)
def test_a_config_of_another_shape_is_refused_by_name(config: str, tmp_path: Path) -> None:
    folder = target_folder(tmp_path)
    (folder / "config.json").write_bytes(config.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_target(TargetConfig(name=folder.name), tmp_path)


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "longer", "dangling", "shard"])
def test_weights_that_are_not_whole_are_found_before_an_engine_loads_them(damage: str, tmp_path: Path) -> None:
    folder = target_folder(tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    data = {"cut": whole[:-1], "empty": b"", "garbage": b"\x05" + bytes(20), "longer": whole + b"x"}
    if damage in data:
        file.write_bytes(data[damage])
    elif damage == "dangling":
        (folder / "more.safetensors").symlink_to(tmp_path / "nowhere")
    else:
        weight_map = {"w": "model.safetensors", "v": "model-00002.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(MissingTarget, match=r"Small-1 is not whole: .*(model|more)"):
        open_target(TargetConfig(name=folder.name), tmp_path)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            {"train.epoch": 2},
            "with train.epoch overridden is not a valid round: there is no field train.epoch (did you",
        ),
        ({"extract.tapes": [1]}, "there is no field extract.tapes (did you mean extract.taps?)"),
        ({"engines.vllm.zzz": 1}, "there is no field engines.vllm.zzz."),
        ({"extract.taps": [2, 15, 31]}, "not a valid round: tap 31 does not exist in a target of 30 layers"),
    ],
)
def test_a_wrong_override_is_named_and_the_right_one_suggested(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_round(round_file("smoke"), overrides)
