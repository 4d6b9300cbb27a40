from itertools import product

from kernels.pairs import covering


def test_every_pair_is_met_by_few_cells() -> None:
    sizes = (8, 3, 5)
    chosen = covering(list(product(*map(range, sizes))))
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert {(cell[i], cell[j]) for cell in chosen} == set(product(range(sizes[i]), range(sizes[j])))
    assert len(chosen) < 50  # of 120; 40 is the least


def test_two_axes_are_taken_whole() -> None:
    cells = list(product(range(3), range(4)))
    assert sorted(covering(cells)) == cells
