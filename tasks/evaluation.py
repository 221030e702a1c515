"""Evaluate: acceptance predicted from held-out states, then measured where the draft is served."""

from prefect import get_run_logger, task

from infra.drafter.acceptance import serving_gate
from infra.results import Evaluation
from infra.round import stored
from infra.round.context import RoundContext
from infra.round.draft_layouts import draft_folder, served_draft
from infra.round.ledger import Ledger, Step
from infra.round.serving import Serving
from infra.steps import evaluate as steps
from infra.steps.measure import ServerLost, begin_both, layout, measure
from tasks.options import DELAYS, RETRIES, STEP, attempts, may_pass


@task(task_run_name="evaluate", retries=RETRIES, retry_delay_seconds=DELAYS, retry_condition_fn=may_pass, **STEP)
def evaluate(context: RoundContext, ledger: Ledger, step: Step) -> Evaluation:
    """Serve the target without and with the draft; the serving gate compares with the prediction.

    The servers load while the prediction is computed.
    """
    ledger.notes += attempts()
    done = stored.evaluation(context)
    step.came_to(whole=done is not None)
    if done is not None:
        stored.point(context, "eval")
        return done
    draft = draft_folder(context)
    sets = steps.prompt_sets(context)
    how = layout(context)
    with Serving(context, "bench") as plain, Serving(context, "bench", draft=served_draft(context, draft)) as drafted:
        if how == "interleaved":
            begin_both(context, plain, drafted)
        walked = steps.walk_heldout(context, draft)
        predicted = steps.prediction(walked)
        get_run_logger().info(f"held-out states predict an acceptance length of {predicted.acceptance.length:.3f}")
        try:
            live = measure(context, plain, drafted, sets, how)
        except ServerLost as error:
            ledger.notes.append(f"{error.what}; all was measured again")
            raise
        ledger.started(plain)
        ledger.started(drafted)
    evaluation = steps.judge(context, predicted, live, sets, how, steps.pair_steps(context, walked, live, sets))
    serving_gate(*steps.compared(evaluation), context.config.evaluate.tolerance, evaluation.paired)
    stored.write_result(context, "eval", stored.EVALUATION, evaluation)
    ledger.notes += steps.shortfalls(context, evaluation, sets) + steps.late_client(evaluation)
    step.detail = f"{how}, {' and '.join(f'{len(item.prompts)} {item.name}' for item in sets)} prompts"
    if too_long := len(context.evaluation_prompts) - len(sets[-1].prompts):
        step.detail += f"; {too_long} evaluation prompts were too long"
    return evaluation
