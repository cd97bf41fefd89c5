# measure.sh CORE: all parts of mla's tables that are not there yet, on one core; two may run beside one another
core=$1
cd "$(dirname "$0")/../../code-T" || exit
P=(drift)  # an hour
for s in multi tally frames single legend chain retrieval control; do P+=("split $s"); done
P+=(situations storage "orders of 6" "orders of 4" "orders of 3")
for s in multi frames legend tally; do for n in 6 5 4 3 2; do P+=("composition $s $n"); done; done
P+=("composition chain 4" "composition chain 3" "composition chain 2")
for s in single control; do P+=("composition $s 6" "composition $s 3"); done
exec taskset -c $core env PYTHONPATH=$PWD OMP_NUM_THREADS=1 ../main/.venv/bin/python .orbitserve/part.py "${P[@]}"
