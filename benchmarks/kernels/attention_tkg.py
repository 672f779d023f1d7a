"""Launches nki-library's attention_tkg, whose queries and new key lie in SBUF."""

import nki
import nki.isa as nisa
import nki.language as nl
from nkilib.core.attention.attention_tkg import attention_tkg
from nkilib.core.attention.attention_tkg_utils import AttnTKGConfig
from nkilib.core.utils.allocator import SbufManager


@nki.jit
def decode(
    q, k_active, v_active, k_prior, v_prior, positions, heads, starts=None, inv_freqs=None
):  # fmt: skip
    """Return the attention [batch, heads, d, 1] of one token of each sequence, one head of keys.

    q: [d, batch heads]. k_active: [d, batch]. v_active: [batch, 1, 1, d]. k_prior: [batch, 1, d,
    context]. v_prior: [batch, 1, context, d]. positions: [batch, 1]. starts: [batch, 1], the first
    key that a window lets each token see. inv_freqs: [d / 2, 1], with RoPE, which then rotates the
    new key too and is returned with it.
    """
    batch, _, context, d = v_prior.shape
    config = AttnTKGConfig(
        bs=batch, q_head=heads, s_active=1, curr_sprior=context, full_sprior=context, d_head=d,
        use_pos_id=True, qk_in_sb=True, fuse_rope=inv_freqs is not None,
    )  # fmt: skip
    memory = SbufManager(0, nl.tile_size.total_available_sbuf_size - 16 * 1024)
    memory.open_scope()
    out = nl.ndarray((batch, heads, d, 1), dtype=q.dtype, buffer=nl.shared_hbm)
    q_sb = memory.alloc_stack(q.shape, dtype=q.dtype, buffer=nl.sbuf)
    k_sb = memory.alloc_stack(k_active.shape, dtype=q.dtype, buffer=nl.sbuf)
    nisa.dma_copy(q_sb, q)
    nisa.dma_copy(k_sb, k_active)
    k_out = None
    if inv_freqs is not None:
        k_out = nl.ndarray((batch, 1, d, 1), dtype=q.dtype, buffer=nl.shared_hbm)
    made, rotated = attention_tkg(
        q_sb, k_sb, v_active, k_prior, v_prior, None, out, config, memory, inv_freqs=inv_freqs,
        rope_pos_ids=positions, start_pos_ids=starts, k_out=k_out,
    )  # fmt: skip
    memory.close_scope()
    return made if inv_freqs is None else (made, rotated)
