# records.sh: growth, alone, and all records of mla, into code-T's tests/benchmarks/results
cd "$(dirname "$0")/../../code-T" || exit
R=tests/benchmarks/results; B="../main/.venv/bin/orbitserve bench fidelity --model infra/reference/weights/kimi_vl --work .orbitserve/tables"
export PYTHONPATH=$PWD
one() { $B --items $1 $2 --json $R/fidelity-mla-$3-cpu2.json --markdown $R/fidelity-mla-$3-cpu2.md --plot $R/fidelity-mla-$3-cpu2.png; }
one 500 "--only growth" growth-500
one 500 "--only splits --only storage" 500
one 500 "--only drift" drift-500
one 250 "--only orders" orders-250
one 250 "--only composition" composition-250
