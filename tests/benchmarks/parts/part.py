"""One part of mla's tables: part.py CORE_ITEMS... : `split S`, `storage`, `drift`, `situations`, `orders of K`, `composition S N`."""
import logging, os, sys, time
from functools import partial
from pathlib import Path
import torch
from infra.vllm_env import vllm_environment
os.environ.update(vllm_environment(kv_cache_gib=1, threads=1))
from infra.reference import WEIGHTS
from infra.reference.families import FAMILIES
from infra.reference.scenes import Split, ASKED
from serving.bench.fidelity import bench, composition, envelope, online, reorder, storage, tables
from serving.bench.fidelity.reader import Reader
from serving.bench.fidelity.study import Study

folder, work = WEIGHTS / "kimi_vl", Path(".orbitserve/tables")

def main():
    reader = Reader(folder, trust_remote_code=True)
    logging.getLogger("vllm.v1.worker.cpu_worker").setLevel(logging.ERROR)
    with torch.inference_mode():
        study = Study(reader, FAMILIES["kimi_vl"])
        tried = None
        for name in sys.argv[1:]:
            claim = Path(".orbitserve/claims") / name.replace(" ", "_")
            claim.parent.mkdir(exist_ok=True, parents=True)
            try:
                claim.touch(exist_ok=False)
            except FileExistsError:
                continue
            began = time.time()
            items = 250 if name.startswith(("orders", "composition")) else 500
            kept = bench.kept_parts(work, "kimi_vl", reader.engine.fingerprint, items)
            what, *rest = name.split(" ")
            if what == "split":
                tried = tried or tables.Tried.by(study)
                measure = partial(tried.measure, study, Split(rest[0]), items)
            elif what == "storage":
                measure = partial(storage.storage, study, Split.multi, tables.STORED_RANK, items, ASKED[Split.multi])
            elif what == "drift":
                measure = lambda: envelope.envelope(study, items)
            elif what == "situations":
                measure = lambda: online.online(study, -(-items // len(online.SPLITS)))
            elif what == "orders":
                measure = partial(reorder.reorder, study, int(rest[1]), items)
            else:
                measure = partial(composition.compositions, study, Split(rest[0]), int(rest[1]), items)
            print("start", name, time.strftime("%H:%M:%S"), flush=True)
            part = kept.once(name, measure)
            if what == "split":
                print({a: round(part[0][a]["accuracy"], 3) for a in ("exact", "blind", "patch_16")}, flush=True)
            print("done", name, round((time.time() - began) / 60, 1), "min", flush=True)
    reader.close()

if __name__ == "__main__":
    main()
