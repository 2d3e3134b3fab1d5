"""Recipes: the library, strictness, round trips, fingerprints, differences."""

import dataclasses

import pytest

import quatrain as qt
from quatrain.recipe import Keep, Phase, diff

NAMES = ["bf16", "fp8", "mxfp4", "mxfp4-plain", "nvfp4", "nvfp4-12b", "nvfp4-46", "nvfp4-46-all", "nvfp4-plain"]
NAMES += ["adamw-nvfp4", "root", "root-nvfp4", "root-nvfp4-split"]
S = qt.QuantSpec


def test_the_library() -> None:
    assert [n for n in NAMES if n in qt.recipe_names()] == NAMES
    for name in qt.recipe_names():
        recipe = qt.load_recipe(name)
        assert recipe.name == name and recipe.description and recipe.source
    assert len({qt.load_recipe(n).fingerprint() for n in NAMES}) == len(NAMES)


def test_the_six_rows_of_nvfp4() -> None:
    rows = qt.load_recipe("nvfp4").linear
    assert rows.fprop_input == S() and rows.fprop_weight == rows.dgrad_weight == S(block=(16, 16))
    assert rows.dgrad_grad == S(rounding="stochastic")
    assert rows.wgrad_grad == S(rounding="stochastic", transform="hadamard") and rows.wgrad_input == S(
        transform="hadamard"
    )
    assert qt.load_recipe("nvfp4").keep == Keep(last_share=0.15)
    assert qt.load_recipe("nvfp4-12b").keep == Keep(first_blocks=2, last_blocks=8)


def test_the_other_recipes() -> None:
    fp8 = qt.load_recipe("fp8")
    assert fp8.keep == Keep(first_blocks=1, last_blocks=2) and fp8.linear.fprop_weight == S("fp8", (128, 128))
    assert all(r.format == "fp8" and r.scale == "fp32" for r in fp8.linear.rows)
    assert all(r == S() for r in qt.load_recipe("nvfp4-plain").linear.rows)
    assert all(r == S("mxfp4", scale="rceil") for r in qt.load_recipe("mxfp4-plain").linear.rows)
    mx = qt.load_recipe("mxfp4").linear
    assert mx.fprop_weight.block == (32, 32) and mx.wgrad_input.transform == qt.Hadamard(32)
    assert mx.dgrad_grad.rounding == mx.wgrad_grad.rounding == "stochastic"
    activations = qt.load_recipe("nvfp4-46").linear
    assert [r.scale for r in activations.rows] == ["four-over-six", "to-6", "to-6", "to-6", "to-6", "four-over-six"]
    everything = qt.load_recipe("nvfp4-46-all").linear
    assert all(r.scale == "four-over-six" and r.error == "mae" for r in everything.rows)


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str, tmp_path) -> None:
    recipe = qt.load_recipe(name)
    assert qt.load_recipe(recipe.to_toml()) == recipe
    path = tmp_path / "r.toml"
    path.write_text(recipe.to_toml())
    assert qt.load_recipe(path) == qt.load_recipe(str(path)) == recipe
    assert hash(recipe) == hash(qt.load_recipe(path))
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.name = "other"


def test_empty_text_is_bf16() -> None:
    assert qt.load_recipe("").fingerprint() == qt.load_recipe("bf16").fingerprint()
    assert not qt.load_recipe("").quantizes


def test_fingerprint_is_of_the_resolved_numbers() -> None:
    short = '[linear]\nfprop.input = "nvfp4"\n'
    row = '{ scale = "to-6", rounding = "nearest", format = "nvfp4", block = [1, 16] }'
    long = f'name = "x"\n[linear]\nfprop.input = {row}\n'
    assert qt.load_recipe(short).fingerprint() == qt.load_recipe(long).fingerprint()
    zero = short + "[linear.keep]\nlast_share = 0\n"
    assert qt.load_recipe(zero).fingerprint() == qt.load_recipe(short).fingerprint()
    other = short.replace('"nvfp4"', '{ format = "nvfp4", rounding = "stochastic" }')
    assert qt.load_recipe(short).fingerprint() != qt.load_recipe(other).fingerprint()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "foo = 1",
            "unknown key 'foo' in the recipe; valid keys: name, description, source, linear, attention, opti",
        ),
        ("[linear]\nfprop.inputs = 'nvfp4'", r"unknown key 'fprop.inputs' in \[linear\].*did you mean 'fprop.input'"),
        ("[linear]\nfprop.input = { format = 'nvfp4', round = 'x' }", "fprop.input: unknown key 'round'.*valid keys"),
        ("[linear]\nfprop.input = { format = 'int4' }", "fprop.input: format must be one of"),
        ("[linear]\nfprop.input = 3", "must be a table, received 3"),
        ("[linear.keep]\nlast = 1", r"unknown key 'last' in \[linear.keep\]; valid keys: last_share"),
        ("[linear.keep]\nlast_share = 1.5", r"last_share must lie in \[0, 1\), received 1.5"),
        ("[linear.keep]\nlast_blocks = -1", "must not be negative"),
        ("[linear.keep]\nlast_blocks = true", "keep.last_blocks must be a int"),
        ("[linear.keep]\nhead = 1", "keep.head must be a bool"),
        ("[linear.keep]\nnames = 'x'", "list of patterns"),
        ("[[phase]]\nbf16 = 'forward'", "phase.at must be a fraction"),
        ("[[phase]]\nat = 2.0", r"in \[0, 1\), received 2.0"),
        ("[[phase]]\nat = 0.5\nbf16 = 'backward'", '"forward" or "both"'),
        ("[[phase]]\nat = { step = 5 }", "put it in the run file"),
        ("[[phase]]\nat = 0.5\nto = 1", r"unknown key 'to' in \[\[phase\]\]"),
        ("[linear]\nwgrad.input = { format = 'nvfp4', transform = 'hadamard' }", "same transform"),
        (
            "[linear]\nfprop.input = { format = 'nvfp4', error = 'mse' }",
            "only scale = .four-over-six. and .search. have",
        ),
        ("[linear]\nfprop.input = { format = 'nvfp4', rouding = 'x' }", "did you mean 'rounding'"),
        ("[attention]\nsmooth = true", "attention.smooth has no effect without an operand row"),
        ("a = [", "must be TOML"),
        ("name = 3", "name must be text"),
    ],
)
def test_strict(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qt.load_recipe(text)


def test_a_file_without_a_name_takes_its_own(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[linear]\nfprop.input = "nvfp4"\n')
    assert qt.load_recipe(path).name == "mine"


def test_names_and_paths() -> None:
    with pytest.raises(ValueError, match="no recipe named 'nvfp5'.*did you mean 'nvfp4'"):
        qt.load_recipe("nvfp5")
    with pytest.raises(FileNotFoundError, match="no recipe file"):
        qt.load_recipe("missing.toml")


def test_files_of_other_editors(tmp_path) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes(b"\xef\xbb\xbf" + qt.load_recipe("nvfp4").to_toml().encode())
    assert qt.load_recipe(path) == qt.load_recipe("nvfp4")
    path.write_bytes(b'name = "\xff"')
    with pytest.raises(ValueError, match="must be UTF-8 text"):
        qt.load_recipe(path)
    with pytest.raises(ValueError, match="must be TOML"):
        qt.load_recipe("x = " + "[" * 5000)
    with pytest.raises(ValueError, match=r"\[\[phase\]\] tables"):
        qt.load_recipe("phase = 3")


def test_phases() -> None:
    recipe = qt.load_recipe("[[phase]]\nat = 0.8\nbf16 = 'forward'\n[[phase]]\nat = 0.9\n")
    assert recipe.phases == (Phase(0.8, None, "forward"), Phase(0.9, None, "both"))
    assert qt.load_recipe(recipe.to_toml()) == recipe
    with pytest.raises(ValueError, match="either a fraction or a step"):
        Phase()


def test_diff_reads_like_a_method_section() -> None:
    changes = diff(qt.load_recipe("nvfp4-plain"), qt.load_recipe("nvfp4"))
    assert ("fprop.weight.block", "1x16", "16x16") in changes
    assert ("wgrad.grad.rounding", "nearest", "stochastic") in changes
    assert ("keep.last_share", "0.0", "0.15") in changes
    assert diff(qt.load_recipe("nvfp4"), qt.load_recipe("nvfp4")) == []
    assert diff(qt.load_recipe("root-nvfp4"), qt.load_recipe("root")) == [  # what is absent is as good as named
        ("optimizer.operands", "nvfp4 1x16 four-over-six mse 256", "BF16")
    ]
    muon = qt.load_recipe('[optimizer]\nname = "muon"\n')
    assert diff(qt.load_recipe("root"), muon)[1:] == [
        ("optimizer.coefficients", "fitted", "jordan"),
        ("optimizer.clip", "0.99", "1.0"),
    ]
    assert diff(qt.load_recipe("bf16"), qt.load_recipe("fp8"))[0] == ("fprop.input", "BF16", "fp8 1x128")
