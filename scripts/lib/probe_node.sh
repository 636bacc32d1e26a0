# shellcheck shell=sh
# What check_nodes.sh asks a node, as POSIX shell from standard input: lines of key=value.
echo "time=$(date +%s%3N)"
echo "host=$(uname -n)"
echo "cpus=$(getconf _NPROCESSORS_ONLN)"
echo "load=$(cut -d' ' -f1 /proc/loadavg)"
if command -v nvidia-smi >/dev/null 2>&1; then
    rows=$(timeout 15 nvidia-smi --format=csv,noheader,nounits \
        --query-gpu=memory.used,utilization.gpu,ecc.errors.uncorrected.volatile.total 2>&1) ||
        echo "fault=nvidia-smi: $(echo "$rows" | head -n 1)"
    echo "$rows" | awk -F', *' '
        $1 ~ /^[0-9]+$/ { gpus++; if ($1 > used) used = $1; if ($2 + 0 > busy) busy = $2 + 0
                          if ($3 ~ /^[1-9]/) errors += $3 }
        END { printf "gpus=%d\nmemory_mib=%d\nbusy=%d\necc_errors=%d\n", gpus, used, busy, errors }'
    echo "nvlinks=$(timeout 15 nvidia-smi nvlink --status 2>/dev/null | grep -c 'GB/s')"
fi
active=0 rate=0
for port in /sys/class/infiniband/*/ports/*; do
    [ -r "$port/state" ] || continue
    case $(cat "$port/state") in *ACTIVE*) active=$((active + 1)) ;; *) continue ;; esac
    this=$(sed 's/[ .].*//' "$port/rate")
    if [ "$this" -gt "$rate" ]; then rate=$this; fi
done
echo "ports=$active"
echo "rate_gbit=$rate"
