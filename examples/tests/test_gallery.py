"""The programs of the gallery run without a warning, draw a picture, and find what their text says."""

import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

GALLERY = Path(__file__).parents[1] / "gallery"
PROGRAMS = sorted(GALLERY.glob("*.py"))

# of each program, by the names that it leaves behind, whether the sentences around its picture are true
CLAIMS = {
    "classification": lambda r: (
        r["held"] >= 0.92
        and np.mean(r["interval"].mean.numpy() > 0.95) > 0.6  # sure of nearly all of the plane
        and set(r["pictures"]["labels in the set"].tolist()) == {1, 2}
        and r["band"].leverage(r["plane"]).median() > 5 * r["band"].leverage(r["X"]).median()
    ),
    "forecasting": lambda r: r["shares"]["fixed"][0] < 0.6 and min(r["shares"]["online"]) > 0.8,
    "groups": lambda r: (
        r["pooled"].max() > 0.97
        and r["pooled"].min() < 0.75
        and r["grouped"].min() > 0.8
        and r["plain"][-1] < r["weighted"][-1]
    ),
    "images": lambda r: 0.85 < r["covered"] < 0.95 and np.sort(r["width"])[-6:].min() > 1.5 * np.sort(r["width"])[5],
    "optimisation": lambda r: abs(r["best"] - 0.8) < 0.03,
    "outputs": lambda r: r["share"] > 0.85 and r["area"][-1] > 10 * r["area"][8],
    "pipeline": lambda r: r["covered"] > 0.8 and r["scores"].min() > 0.7,
    "serving": lambda r: r["difference"] < 1e-4,
    "tabular": lambda r: 0.84 < r["covered"].mean() < 0.96,
    "transformer": lambda r: (
        max(r["typical"][3:]) < 2 * max(r["typical"][:3])
        and min(r["unusual"][3:]) > 1.5 * max(r["unusual"][:3])
        and min(r["coverage"][:3]) > 0.8
        and max(r["coverage"][4:]) < 0.5
    ),
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_of_the_gallery_shows_what_it_says(program, tmp_path, monkeypatch):
    plt.switch_backend("Agg")
    monkeypatch.chdir(tmp_path)
    left = runpy.run_path(str(program))
    assert CLAIMS[program.stem](left)
    assert plt.get_fignums()
    for number in plt.get_fignums():
        figure = plt.figure(number)
        figure.canvas.draw()
        assert all(ax.has_data() for ax in figure.axes)
    plt.close("all")


def test_the_gallery_has_ten_programs_and_a_claim_of_each():
    assert len(PROGRAMS) >= 10
    assert {program.stem for program in PROGRAMS} == set(CLAIMS)


def test_a_page_of_the_documentation_shows_the_picture_of_each_program():
    pages = "".join(page.read_text() for page in (GALLERY.parents[1] / "docs").glob("*.md"))
    for program in PROGRAMS:
        assert (GALLERY.parents[1] / "docs" / "images" / f"{program.stem}.png").exists()
        assert f"](images/{program.stem}.png)" in pages
