"""Tables from results."""

import numpy as np
import pandas as pd
import pytest

from experiments import paper_report


def test_tables_put_the_paper_s_values_beside_ours_and_the_best_in_bold(tmp_path):
    def row(method, split, p_cov, r, w_sd, score):
        numbers = {"p_cov": p_cov, "r": r, "w_sd": w_sd, "score": score}
        rest = {"effective_parameters": 10.0, "seconds": 1.0, "setting": "x"}
        return {"data": "wine-red", "split": split, "method": method, **numbers, **rest}

    pd.DataFrame(
        [
            row("directions", 0, 0.94, 0.10, 3.0, 4.0),
            row("directions", 1, 0.96, 0.20, 3.2, 5.0),
            row("compressed", 0, 0.90, 0.30, 3.7, 4.2),
            row("compressed", 1, 0.90, 0.30, 3.7, 4.2),
            row("without dropout", 0, 0.80, np.nan, 1.96, 6.0),
        ]
    ).to_csv(tmp_path / "methods.csv", index=False)
    paper_report.write(tmp_path)
    text = (tmp_path / "tables.md").read_text()
    assert "| wine-red | directions | 0.950 (0.946) | 0.150 (0.144) | 3.100 (3.08) | 10 | 1.0 (1) |" in text
    for line in (
        "| wine-red | 2 | – | **0.950 ± 0.010** (0.946) | 0.900 ± 0.000 (0.946) | – | – | 0.800 ± nan (0.801) | – |",
        "| wine-red | 2 | – | 0.150 ± 0.050 (0.144) | **0.300 ± 0.000** (0.144) | – | – | – | – |",
        "| wine-red | 2 | – | 4.500 ± 0.500 | **4.200 ± 0.000** | – | – | 6.000 ± nan | – |",
        "| wine-red | directions | +0.004 | 1.006 | yes |",
        "| wine-red | compressed | -0.046 | 1.201 | no |",
        "| all | directions | | | 1 of 1 |",
    ):
        assert line in text, line
    assert "| year | not run: data not at hand |" in text
    table = pd.read_csv(tmp_path / "tables.csv")
    assert table[table.method == "directions"].w_sd_paper.item() == pytest.approx(3.082)
