import math

import pytest

from quatrain.report.gaps import final_gap, group_runs
from quatrain.statistics import gap_percent, mean_interval, t_quantile
from quatrain.train.comparison import paired_gap

# R: qt(0.975, c(1:10, 29, 30, 120))
QUANTILES = {
    1: 12.7062047, 2: 4.3026527, 3: 3.1824463, 4: 2.7764451, 5: 2.5705818, 6: 2.4469119, 7: 2.3646243, 8: 2.3060041,
    9: 2.2621572, 10: 2.2281389, 29: 2.0452296, 30: 2.0422725, 120: 1.9799304,
}  # fmt: skip


@pytest.mark.parametrize(("freedom", "quantile"), QUANTILES.items())
def test_t_quantile(freedom, quantile):
    assert t_quantile(freedom) == pytest.approx(quantile, abs=1e-6)


def test_t_quantile_of_another_level():
    assert t_quantile(2, 0.9) == pytest.approx(2.9199856, abs=1e-6)
    assert t_quantile(10**4) == pytest.approx(1.960201, abs=1e-5)


def test_mean_interval():
    mean, half = mean_interval([10.0, 2.0, 0.0])
    assert mean == 4.0 and half == pytest.approx(4.3026527 * math.sqrt(28.0) / math.sqrt(3.0))
    assert mean_interval([3.0]) == (3.0, None)
    with pytest.raises(ValueError, match="needs values"):
        mean_interval([])


def test_gap_percent():
    assert gap_percent(3.03, 3.0) == pytest.approx(1.0)
    assert math.isnan(gap_percent(1.0, 0.0))


def test_the_report_and_the_comparison_give_one_interval(tmp_path):
    from test_report import fake_run, put_losses

    losses = {"bf16": (4.0, 5.0, 4.5), "nvfp4": (4.04, 5.15, 4.4)}
    for name, ends in losses.items():
        for seed, end in enumerate(ends):
            put_losses(fake_run(tmp_path, name, seed), [7.0, end])
    from quatrain.report import find_runs
    from quatrain.report.collect import read_runs

    base, other = group_runs(read_runs(find_runs(tmp_path)), "bf16")
    shown, table = final_gap(other, base), paired_gap(losses["nvfp4"], losses["bf16"])
    assert (shown.mean, shown.high - shown.mean) == pytest.approx((table.mean, table.half_width))
