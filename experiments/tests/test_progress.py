import io

import pytest
from tqdm import tqdm

from experiments import energy, progress, reproduce, score
from experiments.tests.small_data import options, small


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only where they are put."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_of_many_texts_one_a_second_gets_through(clock):
    heard = []
    say = progress.seldom(heard.append)
    for tenth in range(25):
        clock[0] = 100 + tenth / 10
        say(f"{tenth / 10}")
    assert heard == ["0.0", "1.0", "2.0"]


def test_a_terminal_shows_a_text_at_once_and_a_log_with_the_next_step(clock):
    for file, shown in ((Terminal(), True), (io.StringIO(), False)):
        with tqdm(total=2, file=file, mininterval=0) as bar:
            progress.beside(bar)("epoch 1")
            assert ("epoch 1" in file.getvalue()) == shown
            bar.update()
            assert "epoch 1" in file.getvalue()


@pytest.mark.parametrize(
    ("study", "few"),
    [(reproduce, ["--methods", "exact", "--splits", "1"]), (score, []), (energy, ["--splits", "1"])],
    ids=["reproduce", "score", "energy"],
)
def test_the_log_of_a_short_run_is_short(folder, monkeypatch, capsys, study, few):
    if study is energy:
        small(monkeypatch, folder, "energy")
    monkeypatch.setattr(score, "RANKS", (2,))
    study.main([*options(folder, "out.csv"), *few])
    log = capsys.readouterr().err
    assert log.count("epoch") < 10
    assert len(log) < 3000
