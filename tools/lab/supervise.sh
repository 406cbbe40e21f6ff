#!/bin/sh
# supervise.sh REBOOT_STATUS CGROUP2 BASE FOLDER CGROUPS COMMAND...
# Runs one host: enters its control groups (CGROUPS, colon between), lays the overlay FOLDER/upper over
# BASE at FOLDER/root inside a mount namespace that ends with this process, and boots COMMAND there,
# again and again as long as it ends with REBOOT_STATUS (the host asked for a reboot).
set -eu
reboot_status=$1 cgroup2=$2 base=$3 folder=$4 groups=$5
shift 5

IFS=:
for group in $groups; do echo $$ > "$group/cgroup.procs"; done
unset IFS

if [ "$cgroup2" = mount ]; then mount -t cgroup2 none /sys/fs/cgroup; fi

if ! mount -t overlay overlay -o "lowerdir=$base,upperdir=$folder/upper,workdir=$folder/work" "$folder/root"; then
    echo "no overlay on this file system: copying the base tree" >&2
    [ -e "$folder/root/etc" ] || cp -a --reflink=auto "$base/." "$folder/upper/." "$folder/root/"
fi

child=
trap 'kill -TERM "$child"' TERM
while :; do
    "$@" & child=$!
    while :; do
        status=0
        wait "$child" || status=$?
        kill -0 "$child" 2>/dev/null || break # else the wait was cut short by a signal
    done
    [ "$status" -eq "$reboot_status" ] || exit "$status"
    echo "reboot" >&2
done
