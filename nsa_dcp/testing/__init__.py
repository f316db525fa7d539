"""What this package's own tests judge by, shipped so that whoever changes a kernel or a split can judge it alike.

    from nsa_dcp.testing.cases import draw_selection, poisoned      inputs that a careless implementation gets wrong
    from nsa_dcp.testing.oracle import attend_dense, deal_slots     answers of one process, which shares no index math
    from nsa_dcp.testing.assertions import assert_close, assert_bitwise_equal

`batch` draws requests in a paged pool, `poisoned_memory` makes what nobody wrote read as NaN, and `recorded_generation`
runs the embedded engine on every rank and keeps its selections and logits. Nothing else in the package imports these.
"""
