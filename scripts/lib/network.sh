# shellcheck shell=bash
# Finds which network of this node the ranks shall use, where the site's settings do not say it.

# Sets what is not set; $1 is the address of the first node, or nothing on a single node.
network_settings() {
    local device cards
    device=$(device_towards "$1")
    if [[ -n $device ]]; then
        export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$device}
        export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$device}
    fi
    cards=$(fastest_cards /sys/class/infiniband)
    if [[ -n $cards ]]; then export NCCL_IB_HCA=${NCCL_IB_HCA:-$cards}; fi
}

# The device by which this node reaches host $1; on that host itself the one that has its address.
device_towards() {
    local address device=""
    if [[ -z $1 ]] || ! command -v ip >/dev/null 2>&1; then return; fi
    address=$(getent ahostsv4 "$1" | awk 'NR == 1 { print $1 }') || address=""
    address=${address:-$1}
    if [[ $address == 127.* || $address == ::1 ]]; then # /etc/hosts gives many hosts' own names so
        device=$(ip -o route show default | sed -n '1s/.* dev \([^ ]*\).*/\1/p')
    else
        device=$(ip -o address show to "$address" 2>/dev/null | awk 'NR == 1 { print $2 }') || device=""
    fi
    if [[ -z $device ]]; then
        device=$(ip -o route get "$address" 2>/dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p') || device=""
    fi
    printf '%s' "$device"
}

# "=name:port,..." of the active InfiniBand or RoCE ports of the highest rate: a card for storage or
# management beside them would be used for training, too.
fastest_cards() {
    local port rate card best=0 found=""
    for port in "$1"/*/ports/*; do
        [[ -r $port/state && $(<"$port/state") == *ACTIVE* ]] || continue
        rate=$(<"$port/rate") # "400 Gb/sec (4X NDR)"
        rate=${rate%%[ .]*}
        card=${port%/ports/*}
        if ((rate > best)); then best=$rate found=""; fi
        if ((rate == best)); then found+=,${card##*/}:${port##*/}; fi
    done
    if [[ -n $found ]]; then printf '=%s' "${found#,}"; fi
}
