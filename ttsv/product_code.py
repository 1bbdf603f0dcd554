"""The code of `ttsv.tile_products`: many products of matrices.

A few rows of the result at a time, and two vectors of its columns, are summed in registers: for each number of the
left factor, in all lanes of one, two of the right factor's are read. The right factor's strip of columns stays in the
first cache, the left factor in the second, so that neither is copied to another order first. Meanwhile the next rows
of the left one (where they lie side by side), the next columns of the right one and the result's place are fetched.
"""

from typing import Any

from ttsv.vector_code import LINE, VectorCode, number

ADDRESSES = ("left", "right", "target")
NUMBERS = (
    *("places", "rows", "inner", "columns"),
    *("left_place", "left_row", "left_inner"),
    *("right_place", "right_inner"),
    *("target_place", "target_row"),
)
_ROWS, _COLUMNS = (12, 4, 1), (32, 16, 4, 1)
"""Of the result at once: of 32 registers of 16 numbers the sums take 24."""


def code_of_product(add: bool) -> str:
    """For every place `target = left right`, or with `add` `target + left right`."""
    code = VectorCode(ADDRESSES, NUMBERS)
    build, given = code.build, code.given

    with code.loop(given["places"]) as place:
        left, right, target = (code.place(given[side], build.mul(place, given[f"{side}_place"])) for side in ADDRESSES)

        def strip(column: Any, columns: int) -> None:
            def block(row: Any, rows: int) -> None:
                start = code.place(left, build.mul(row, given["left_row"]))
                found = code.place(target, build.add(build.mul(row, given["target_row"]), column))
                _block(code, start, code.place(right, column), found, rows, columns, add)

            code.in_parts(given["rows"], _ROWS, block)

        code.in_parts(given["columns"], _COLUMNS, strip)
    return code.text()


def _block(code: VectorCode, left: Any, right: Any, target: Any, rows: int, columns: int, add: bool) -> None:
    """So many rows and columns of one product; the addresses are those of the first numbers that it needs."""
    build, given = code.build, code.given
    found = [code.place(target, build.mul(given["target_row"], number(row))) for row in range(rows)]
    for address in found:
        code.expect(address, columns, written=True)
    next_left = code.place(left, build.mul(given["left_row"], number(rows)))
    sums = [code.variable(code.zeros(columns)) for _ in found]
    with code.loop(given["inner"]) as inner:
        code.expect(code.place(next_left, build.mul(inner, number(LINE))), LINE)
        here = code.place(right, build.mul(inner, given["right_inner"]))
        code.expect(code.place(here, number(columns)), columns)
        factors = code.load(here, columns)
        start = code.place(left, build.mul(inner, given["left_inner"]))
        for row, total in enumerate(sums):
            factor = code.everywhere(code.place(start, build.mul(given["left_row"], number(row))), columns)
            build.store(code.plus(build.load(total), code.product(factor, factors)), total)
    for address, total in zip(found, sums, strict=True):
        value = build.load(total)
        code.store(code.plus(value, code.load(address, columns)) if add else value, address)
