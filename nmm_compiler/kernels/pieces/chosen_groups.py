"""Which groups tokens choose, on the device: their list, and the gates of the tokens of each.

Numbers and gates of all picks, tokens times top_k, lie on every partition. Groups are a pair of
tiles: int32 [1, groups], which addresses weights, and fp32 [128, groups], which finds their tokens.
"""

import nki.isa as nisa
import nki.language as nl

from .new_tiles import combined, copied, filled, loaded, ramp


def read_picks(picks, count):
    """Return a number of every pick as fp32 on every partition, [128, picks]."""
    return copied(loaded(picks.reshape((1, count)).broadcast(0, 128)), nl.float32)


def chosen_of_token(numbers, weights):
    """Return the picks of the only token as groups; -1 is group 0 with gate 0."""
    count = numbers.shape[1]
    nisa.scalar_tensor_tensor(
        dst=weights, data=numbers, op0=nl.not_equal, operand0=-1, op1=nl.multiply, operand1=weights
    )
    some = nl.ndarray((1, count), dtype=nl.int32, buffer=nl.sbuf)
    first = numbers[0:1, 0:count]
    nisa.scalar_tensor_tensor(
        dst=some, data=first, op0=nl.equal, operand0=-1, op1=nl.add, operand1=first
    )
    return [some, None]


def picks_of_groups(numbers, first, deep):
    """Return 1 where a pick is the group on the partition, fp32 [deep, picks]."""
    picks = numbers.shape[1]
    own = ramp((deep, 1), 0, first, 1)
    return combined(numbers[0:deep, 0:picks], nl.equal, own, nl.float32)


def list_groups(numbers, count, at_once):
    """Return the groups that are chosen, then numbers of none, and last how many they are.

    int32 [1, turns at_once + 1]. A group on a partition finds its own number among the picks.
    """
    row = nl.ndarray((1, count), dtype=nl.float32, buffer=nl.sbuf)
    for first in range(0, count, 128):
        deep = min(128, count - first)
        same = picks_of_groups(numbers, first, deep)
        some = nl.ndarray((deep, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=some, op=nl.maximum, data=same, axis=1)
        turned = nl.ndarray((1, deep), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=some, engine=nisa.engine.tensor)
        nisa.tensor_copy(dst=row[0:1, first : first + deep], src=turned)
    turns = (count + at_once - 1) // at_once
    found = nl.ndarray((1, count + 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.nonzero_with_count(dst=found, src=row, index_offset=0, padding_val=count)
    listed = filled((1, turns * at_once + 1), nl.int32, count)
    nisa.tensor_copy(dst=listed[0:1, 0:count], src=found[0:1, 0:count])
    nisa.tensor_copy(
        dst=listed[0:1, turns * at_once : turns * at_once + 1], src=found[0:1, count : count + 1]
    )
    return listed


def turns_of(listed, at_once, bits):
    """Return in a register the turns of a loop that takes at_once, 2 to the bits, listed groups
    each."""
    last = listed.shape[1] - 1
    turns = combined(listed[0:1, last : last + 1], nl.add, at_once - 1, nl.int32)
    nisa.tensor_scalar(dst=turns, data=turns, op0=nl.right_shift, operand0=bits)
    bound = nisa.register_alloc(0)
    nisa.register_load(dst=bound, src=turns)
    return bound


def listed_in_turn(listed, i, core, spec):
    """Return what is listed for this core in turn i of the loop, int32 [1, at_once]."""
    turn = spec.at_once * spec.cores
    turns = (listed.shape[1] - 1) // turn
    first = core % spec.cores * spec.at_once
    mine = nl.ndarray((1, spec.at_once), dtype=nl.int32, buffer=nl.sbuf)
    lists = listed[0:1, 0 : turns * turn].reshape_dim(1, (turns, turn))
    nisa.tensor_copy(dst=mine, src=lists.select(1, i)[0:1, first : first + spec.at_once])
    return mine


def groups_of_turn(listed, i, core, spec):
    """Return the groups of this core in turn i of the loop."""
    at_once = spec.at_once
    mine = listed_in_turn(listed, i, core, spec)
    # first: loads of weights wait for it; behind the last group that is listed, the last of all
    one = combined(mine, nl.minimum, spec.groups - 1, nl.int32)
    row = copied(mine, nl.float32)
    ones = filled((1, 128), nl.float32, 1.0)
    spread = nl.ndarray((128, at_once), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=spread, stationary=ones, moving=row, is_stationary_onezero=True)
    wide = copied(spread, nl.float32)
    return [one, wide]


def gates_of(group, numbers, weights, m, top_k):
    """Return the gates of the tokens of the group on each partition, [partitions, 1, tokens]."""
    high = numbers.shape[0]
    strip = nl.ndarray((high, 1, m), dtype=nl.float32, buffer=nl.sbuf)
    own = nl.ndarray((high, m, top_k), dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=own.reshape((high, m * top_k)), data=numbers, op0=nl.equal, operand0=group,
        op1=nl.multiply, operand1=weights,
    )  # fmt: skip
    nisa.tensor_reduce(dst=strip[0:high, 0, 0:m], op=nl.add, data=own, axis=2)
    return strip
