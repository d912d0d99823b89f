"""The real compiler, with a cache of its own and as quick as it can be."""

import pytest


@pytest.fixture
def compiler(tmp_path):
    """Inductor whose code leaves vector units alone: to try them, and their headers, is most of a compilation's time.

    In this process and in those that it starts; undone by no test's own `monkeypatch.undo()`.
    """
    from torch._inductor import config, cpu_vec_isa

    with pytest.MonkeyPatch.context() as patch, config.patch({"cpp.vec_isa_ok": False}):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
        patch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        yield tmp_path / "inductor"
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
