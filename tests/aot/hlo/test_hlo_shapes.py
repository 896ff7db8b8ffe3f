"""Bytes of shapes as XLA:TPU prints them; expected values from the tiles, by hand."""

import pytest

from maxdiloco.aot.hlo import shapes


@pytest.mark.parametrize(
    ("text", "logical", "laid_out"),
    [
        ("u8[62464]{0:T(1024)(128)(4,1)}", 62464, 62464),  # 61 tiles of 1024
        ("u8[1000]{0:T(1024)(128)(4,1)}", 1000, 1024),
        ("f32[8,128]", 4096, 4096),
        ("f32[]{:T(128)}", 4, 512),  # a scalar fills a tile
        ("pred[]", 1, 1),
        ("u8[1,1,2048]{2,1,0:T(4,128)(4,1)}", 2048, 8192),  # one row of four is used
        ("bf16[1,4096]{1,0:T(2,128)(2,1)}", 8192, 16384),
        ("bf16[64,1024]{0,1:T(8,128)(2,1)S(1)}", 131072, 262144),  # 64 lies in 128 lanes
        ("f32[3,5,100]{0,2,1:T(8,128)}", 6000, 5 * 104 * 128 * 4),
        ("s4[4096]{0:T(1024)(128)(8,1)E(4)}", 2048, 2048),
    ],
)
def test_bytes_with_and_without_tile_padding(text, logical, laid_out):
    shape = shapes.read(text)
    assert (shape.bytes_logical(), shape.bytes_laid_out()) == (logical, laid_out)


def test_dims_and_dtype_are_kept():
    shape = shapes.read("bf16[8,64,2,64]{1,3,0,2:T(8,128)(2,1)S(1)}")
    assert (shape.dtype, shape.dims) == ("bf16", (8, 64, 2, 64))
    assert shape.in_memory == (2, 8, 64, 64)  # minor to major 1, 3, 0, 2, turned round
    assert shape.tiles == ((8, 128), (2, 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "cannot read .* as the shape of one array")
          for text in ("token[]", "(f32[2])", "f9[2]", "f32[2", "f32[<=8]{0}")),
        *((f"f32[2,2]{{1,0{layout}}}", "tiles that this reader does not know")
          for layout in (":T(*,128)", ":T(8,128)L(2)", ":D(D)")),
    ],
)  # fmt: skip
def test_a_shape_that_it_cannot_read(text, message):
    with pytest.raises(ValueError, match=message):
        shapes.read(text)


def test_parts_of_a_tuple():
    text = "(u8[2,4]{1,0:T(4,128)(4,1)}, /*index=1*/u32[], (s32[], token[]))"
    assert shapes.elements(text) == ["u8[2,4]{1,0:T(4,128)(4,1)}", "u32[]", "(s32[], token[])"]
    assert shapes.elements("f32[2,4]{1,0}") == ["f32[2,4]{1,0}"]
