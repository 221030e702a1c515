"""The report as the files that lie in the store, and as one text for the UI."""

from infra.report.figures import all_figures, data_uri
from infra.report.layers import layers_figure, parity_figure
from infra.report.markdown import report as render
from infra.results import Report


def report_files(report: Report) -> dict[str, bytes]:
    """report.md and its figures (PNG), by file name."""
    figures = {name: (f"{name}.png", data) for name, data in _figures(report).items()}
    text = render(report, {name: file for name, (file, _) in figures.items()})
    return {**dict(figures.values()), "report.md": text.encode()}


def inline_report(report: Report) -> str:
    """report.md with the figures inside, for the UI."""
    return render(report, {name: data_uri(data) for name, data in _figures(report).items()})


def _figures(report: Report) -> dict[str, bytes]:
    drawn = all_figures(report)
    if report.convention is not None and (layers := layers_figure(report.convention)) is not None:
        drawn["layers"] = layers
    return drawn if report.parity is None else drawn | {"parity": parity_figure(report.parity)}
