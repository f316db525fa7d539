"""What this package refuses to launch on a GPU, in one sentence. The tensors have no memory: none is needed."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

import nsa_dcp_kernels as kernels
from nsa_dcp_kernels import _flash_mla


def test_more_heads_than_flash_mla_takes_are_refused():
    assert [_flash_mla.pad_heads(heads) for heads in (1, 64, 65, 128)] == [64, 64, 128, 128]
    with pytest.raises(NotImplementedError, match="1 to 128 heads a rank, got 129"):
        _flash_mla.pad_heads(129)


def test_other_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(RuntimeError, match=r"needs a Hopper GPU .*, found NVIDIA A100 \(8.0\)"):
        _flash_mla.count_sms.__wrapped__(torch.device("cuda", 0))


def test_cache_that_flash_mla_does_not_read_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with FakeTensorMode(), torch.device("cuda:0"):
        q, rows = torch.zeros(2, 8, 576, dtype=torch.bfloat16), torch.zeros(2, 64, dtype=torch.int32)
        with pytest.raises(ValueError, match=r"kv_rows must be uint8 or bfloat16 on a GPU, got torch\.float32"):
            kernels.attend_sparse(q, torch.zeros(64, 576), rows, None, 1.0)


ON_ANY_DEVICE = {
    "out": lambda: kernels.merge_partials(torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4)),
    "topk_slots": lambda: kernels.localize_topk(torch.zeros(2, 64, dtype=torch.int32), 2, 0),
    "cache": lambda: kernels.gather_pages(torch.zeros(64, 8), torch.zeros(1, dtype=torch.int32)),
    "k_nope": lambda: kernels.pack_latent(torch.zeros(3, 512), torch.zeros(3, 64)),
    "slots": lambda: kernels.gather_index_keys(torch.zeros(64, 128), torch.zeros(3, dtype=torch.int32)),
    "logits": lambda: kernels.select_topk(torch.zeros(2, 64), torch.zeros(2, dtype=torch.int32), 8),
}


@pytest.mark.parametrize(("name", "call"), ON_ANY_DEVICE.items(), ids=ON_ANY_DEVICE)
def test_tensors_of_a_gpu_that_is_not_the_current_one_are_refused(name, call, monkeypatch):
    """Launched on the current GPU, the kernel would read another one's memory, or race with what writes it."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    refusal = pytest.raises(ValueError, match=f"{name} must be on the current device, cuda:0, got cuda:1")
    with FakeTensorMode(), torch.device("cuda:1"), refusal:
        call()
