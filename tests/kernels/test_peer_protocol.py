"""The protocol over peer memory, in every interleaving: nothing read too early or too late, nobody waiting for ever.

And that the search would find it: each thing that the protocol does is left out once.
"""

import re

import pytest

from tests.kernels.channel_explorer import Protocol, push_then_wait

GRIDS = [(2, 2, 2), (2, 1, 2, 1), (1, 2, 2), (1, 1, 1, 1, 1)]


@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_two_ranks_whatever_starts_first(grids):
    """Launches of other grids follow each other. All programs of a launch have a place at once."""
    states, wrong = Protocol(2, grids, places=2).explore()
    assert wrong is None and states > 50


@pytest.mark.parametrize("grids", [(2, 1, 2), (1, 1, 1, 1)], ids=str)
def test_three_ranks_whatever_starts_first(grids):
    states, wrong = Protocol(3, grids, places=2).explore()
    assert wrong is None and states > 500


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_one_place_does_where_programs_start_in_order(num_ranks):
    assert Protocol(num_ranks, (2, 2), places=1, starts="ascending").explore()[1] is None


def test_one_place_does_not_do_where_they_start_in_another_order():
    """So a launch must have room for all its programs: what starts first is the GPU's choice."""
    assert "nobody can go on" in Protocol(2, (2, 2), places=1, starts="opposite").explore()[1]
    assert Protocol(2, (2, 2), places=2, starts="opposite").explore()[1] is None


def test_one_slot_is_overwritten_before_it_is_read():
    assert re.fullmatch(r"rank \d reads epoch 2 of rank \d for 1", Protocol(2, (1, 1), places=1, slots=1).explore()[1])


def test_a_flag_before_its_data_lets_the_last_but_one_be_read():
    def flag_first(num_ranks, rank):
        write, *others = push_then_wait(num_ranks, rank)
        flags = [step for step in others if step[0] == "flag"]
        return [*flags, write, *others[len(flags) :]]

    assert "reads epoch -1" in Protocol(2, (1, 1), places=1, steps=flag_first).explore()[1]


def test_waiting_before_pushing_waits_for_ever():
    def wait_first(num_ranks, rank):
        steps = push_then_wait(num_ranks, rank)
        return [step for step in steps if step[0] == "wait"] + [step for step in steps if step[0] != "wait"]

    assert "nobody can go on" in Protocol(2, (1,), places=1, steps=wait_first).explore()[1]


def test_reading_before_waiting_reads_too_early():
    def read_first(num_ranks, rank):
        return [step for step in push_then_wait(num_ranks, rank) if step[0] != "wait"]

    assert "reads epoch" in Protocol(2, (1,), places=1, steps=read_first).explore()[1]


def test_a_wait_for_exactly_its_epoch_misses_a_rank_that_is_ahead():
    assert "nobody can go on" in Protocol(3, (1, 1), places=1, waits_for_equal=True).explore()[1]
