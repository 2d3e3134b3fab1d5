"""The Hadamard transform: worked numbers, orthogonality, order of operations, inverse."""

import pytest
import torch

import quatrain as qt


def test_worked_numbers() -> None:
    h = qt.Hadamard()
    e0 = torch.zeros(16)
    e0[0] = 1
    assert torch.equal(h.forward(e0), torch.full((16,), 0.25))
    assert h.forward(torch.ones(16)).tolist() == [-1, 0, 1, 0, 1, 0, -1, 0, 1, 2, 1, 0, 1, 0, 1, -2]
    assert h.forward(torch.arange(16.0)).tolist() == [
        -14.5, -7.5, 6.5, -0.5, 6.5, -0.5, -14.5, 8.5, 7.5, 14.5, 0.5, 1.5, 0.5, -2.5, 9.5, -15.5,
    ]  # fmt: skip


@pytest.mark.parametrize("size", [4, 16, 32, 64, 128])
@pytest.mark.parametrize("signs", ["fixed", None])
def test_orthogonal_and_inverse(size: int, signs: str | None) -> None:
    h = qt.Hadamard(size, signs)
    matrix = h.forward(torch.eye(size))
    assert torch.allclose(matrix @ matrix.t(), torch.eye(size), atol=1e-6)
    x = torch.randn(3, 5, 2 * size)
    assert torch.allclose(h.inverse(h.forward(x)), x, atol=1e-5)
    signs_repeat = torch.sign(matrix[:, 0])  # first column of H is all ones
    assert signs_repeat.tolist() == list(h.sign_vector())
    if signs == "fixed" and size > 16:
        assert h.sign_vector()[16:32] == h.sign_vector()[:16]


def test_rounds_once_to_the_inputs_dtype() -> None:
    x = torch.randn(64, 32).bfloat16()
    once = qt.Hadamard(32).forward(x.float()).bfloat16()
    assert torch.equal(qt.Hadamard(32).forward(x), once)


def test_ragged_length_raises() -> None:
    with pytest.raises(ValueError, match="multiple of it, received 24"):
        qt.Hadamard(16).forward(torch.zeros(2, 24))
