"""Tables from results."""

import numpy as np
import pandas as pd
import pytest

from experiments import calibration, paper_report, reproduce
from experiments.__main__ import main
from experiments.calibration_report import METHODS
from experiments.rows import Rows


def result(method, split, p_cov, r, w_sd, score):
    numbers = {"p_cov": p_cov, "r": r, "w_sd": w_sd, "score": score}
    rest = {"effective_parameters": 10.0, "seconds": 1.0, "setting": "x"}
    return {"data": "wine-red", "split": split, "method": method, **numbers, **rest}


@pytest.fixture
def methods(tmp_path):
    """Three splits of one method, as a run leaves them."""
    rows = Rows(tmp_path / "methods.csv", reproduce.KEY)
    for split in range(3):
        rows.append([result("directions", split, 0.9 + split / 100, 0.1, 3.0, 4.0)])
    return rows.path


def report(folder):
    main(["report", "--results", str(folder)])


def test_tables_put_the_paper_s_values_beside_ours_and_the_best_in_bold(tmp_path):
    pd.DataFrame(
        [
            result("directions", 0, 0.94, 0.10, 3.0, 4.0),
            result("directions", 1, 0.96, 0.20, 3.2, 5.0),
            result("compressed", 0, 0.90, 0.30, 3.7, 4.2),
            result("compressed", 1, 0.90, 0.30, 3.7, 4.2),
            result("without dropout", 0, 0.80, np.nan, 1.96, 6.0),
        ]
    ).to_csv(tmp_path / "methods.csv", index=False)
    paper_report.write(tmp_path)
    text = (tmp_path / "tables.md").read_text()
    assert "| wine-red | directions | 0.950 (0.946) | 0.150 (0.144) | 3.100 (3.08) | 10 | 1.0 (1) |" in text
    for line in (
        "| wine-red | 1–2 | – | **0.950 ± 0.010** (0.946) | 0.900 ± 0.000 (0.946) | – | – | 0.800 ± nan (0.801) | – |",
        "| wine-red | 1–2 | – | 0.150 ± 0.050 (0.144) | **0.300 ± 0.000** (0.144) | – | – | – | – |",
        "| wine-red | 1–2 | – | 4.500 ± 0.500 | **4.200 ± 0.000** | – | – | 6.000 ± nan | – |",
        "| wine-red | directions | +0.004 | 1.006 | yes |",
        "| wine-red | compressed | -0.046 | 1.201 | no |",
        "| all | directions | | | 1 of 1 |",
    ):
        assert line in text, line
    assert "| year | not run: data not at hand |" in text
    table = pd.read_csv(tmp_path / "tables.csv")
    assert table[table.method == "directions"].w_sd_paper.item() == pytest.approx(3.082)


def test_equals_are_all_in_bold_whatever_their_rounding(tmp_path):
    cells = {"directions": (0.1 + 0.2) * 3.0 + 0.055, "compressed": 0.955, "calibrated": 0.945, "ensemble": 0.956}
    rows = [result(method, 0, p_cov, 0.1, 3.0, 4.0) for method, p_cov in cells.items()]
    pd.DataFrame(rows).to_csv(tmp_path / "methods.csv", index=False)
    paper_report.write(tmp_path)
    coverage = next(line for line in (tmp_path / "tables.md").read_text().split("\n") if "0.956 ±" in line)
    assert coverage.count("**0.955 ± nan**") == 2
    assert coverage.count("**0.945 ± nan**") == 1
    assert "**0.956" not in coverage


def test_what_a_kill_tore_off_is_not_reported(methods):
    report(methods.parent)
    assert "| wine-red | 3 | – | **0.910 ± 0.006**" in (methods.parent / "tables.md").read_text()
    methods.write_bytes(methods.read_bytes()[:-12])
    report(methods.parent)
    assert "| wine-red | 2 | – | **0.905 ± 0.005**" in (methods.parent / "tables.md").read_text()


@pytest.mark.parametrize("name", ["methods", "score", "energy", "parameters", "calibration"])
def test_a_torn_row_is_reported_by_no_part(name, tmp_path):
    (tmp_path / f"{name}.csv").write_text("data,setting,order,split,method,p_cov\nyacht,x,words,0,ours,0.")
    with pytest.raises(SystemExit, match="holds no results: no rows in methods"):
        report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.csv"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace(b"0.91,0.1,3,", b"0.91,3,"), ", line 3: 10 fields expected, got 'wine"),
        (lambda text: text.replace(b"0.91", b"0.9l"), r", line 3: a number expected for p_cov, got '0\.9l'"),
        (lambda text: text.replace(b"0.91", b"\xff"), ", line 3: text expected, got b'wine"),
        (lambda text: text.replace(b"x\n", b'"x\n', 1), ", line 2: 10 fields expected, got 'wine"),
        (lambda text: text.replace(b"method", b"m"), " has no column method; its header is"),
    ],
    ids=["fields", "number", "bytes", "quote", "header"],
)
def test_a_damaged_file_of_results_is_an_error_of_one_line(methods, damage, message):
    methods.write_bytes(damage(methods.read_bytes()))
    with pytest.raises(SystemExit, match=rf"^[^\n]*methods\.csv{message}[^\n]*$"):  # a text: the exit code is 1
        report(methods.parent)


@pytest.mark.parametrize("settings", [1, 2, 3])
@pytest.mark.parametrize(
    ("methods", "line"),
    [
        (METHODS, "**1 ± nan** | 0.900 | 2 ± nan | 0.900 | 3 ± nan | 0.900 | 4 ± nan | 0.900 | +3.000 ± nan"),
        (METHODS[1:], "nan ± nan | nan | **1 ± nan** | 0.900 | 2 ± nan | 0.900 | 3 ± nan | 0.900 | +2.000 ± nan"),
    ],
    ids=["all", "no formula"],
)
def test_a_part_of_the_calibration_experiment_can_be_reported(tmp_path, settings, methods, line):
    rows = Rows(tmp_path / "calibration.csv", calibration.KEY)
    for setting in list(calibration.SETTINGS)[:settings]:
        common = {"data": "yacht", "setting": setting, "split": 0, "n_calibration": 50, "p_cov": 0.9}
        rows.append([{**common, "method": method, "score": score} for score, method in enumerate(methods, start=1)])
    report(tmp_path)
    assert (tmp_path / "calibration.md").read_text().count(f"| yacht | 1 | {line} |") == settings
