#!/bin/sh
# supervise.sh REBOOT_STATUS BASE FOLDER GROUPS COMMAND...
# Runs one host: lays the overlay FOLDER/upper over BASE at FOLDER/root, in a mount namespace that ends
# with this process, and boots COMMAND there, again and again as long as it ends with REBOOT_STATUS (the
# host asked for a reboot). GROUPS are the host's control groups, colon between; empty: the one that this
# process was started in. In each, this process goes to `supervisor` and the host below `engine`, since a
# group with processes of its own cannot hand controllers to the groups below it.
set -eu
reboot_status=$1 base=$2 folder=$3
groups=${4:-/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)}
shift 4

IFS=:
engine=
for group in $groups; do
    mkdir -p "$group/supervisor" "$group/engine"
    echo $$ > "$group/supervisor/cgroup.procs"
    engine="$engine $group/engine/cgroup.procs"
    for controller in cpu cpuset io memory pids; do
        echo "+$controller" > "$group/cgroup.subtree_control" || : # not delegated here: limits are not enforced
    done 2>/dev/null
done
unset IFS

if ! mount -t overlay overlay -o "lowerdir=$base,upperdir=$folder/upper,workdir=$folder/work" "$folder/root"; then
    echo "no overlay on this file system: copying the base tree" >&2
    [ -e "$folder/root/etc" ] || cp -a --reflink=auto "$base/." "$folder/upper/." "$folder/root/"
fi

child=
trap 'kill -TERM "$child"' TERM
while :; do
    # shellcheck disable=SC2016 # $$ is the new shell's
    sh -c 'echo $$ | tee $0 > /dev/null; exec "$@"' "$engine" "$@" &
    child=$!
    while :; do
        status=0
        wait "$child" || status=$?
        kill -0 "$child" 2>/dev/null || break # else the wait was cut short by a signal
    done
    [ "$status" -eq "$reboot_status" ] || exit "$status"
    echo "reboot" >&2
done
