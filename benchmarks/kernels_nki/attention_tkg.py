"""Launches nki-library's attention_tkg, whose queries and new key lie in SBUF."""

import nki
import nki.isa as nisa
import nki.language as nl
from nkilib.core.attention.attention_tkg import attention_tkg
from nkilib.core.attention.attention_tkg_utils import AttnTKGConfig
from nkilib.core.utils.allocator import SbufManager


@nki.jit
def decode(q, k_active, v_active, k_prior, v_prior, positions, heads):
    """Return the attention [batch, heads, d, 1] of one token of each sequence, one head of keys.

    q: [d, batch heads]. k_active: [d, batch]. v_active: [batch, 1, 1, d]. k_prior: [batch, 1, d,
    context]. v_prior: [batch, 1, context, d]. positions: [batch, 1].
    """
    batch, _, context, d = v_prior.shape
    config = AttnTKGConfig(
        bs=batch, q_head=heads, s_active=1, curr_sprior=context, full_sprior=context, d_head=d,
        use_pos_id=True, qk_in_sb=True,
    )  # fmt: skip
    memory = SbufManager(0, nl.tile_size.total_available_sbuf_size - 16 * 1024)
    memory.open_scope()
    out = nl.ndarray((batch, heads, d, 1), dtype=q.dtype, buffer=nl.shared_hbm)
    q_sb = memory.alloc_stack(q.shape, dtype=q.dtype, buffer=nl.sbuf)
    k_sb = memory.alloc_stack(k_active.shape, dtype=q.dtype, buffer=nl.sbuf)
    nisa.dma_copy(q_sb, q)
    nisa.dma_copy(k_sb, k_active)
    made, _ = attention_tkg(
        q_sb, k_sb, v_active, k_prior, v_prior, None, out, config, memory, rope_pos_ids=positions
    )
    memory.close_scope()
    return made
