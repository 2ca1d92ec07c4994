#!/usr/bin/env bash
# A SLURM of one machine and two cores, without systemd, cgroups or root:
#   tests/slurm/cluster.sh start FOLDER     configuration, keys, logs and state go there
#   export SLURM_CONF=FOLDER/slurm.conf     and sbatch, squeue, scontrol speak to it
#   tests/slurm/cluster.sh controller FOLDER    the controller, ended and started again
#   tests/slurm/cluster.sh stop FOLDER
# Debian: apt-get install slurmctld slurmd slurm-client munge
set -euo pipefail
PATH=$PATH:/usr/sbin
act=$1 folder=$(realpath -m "$2")
export SLURM_CONF=$folder/slurm.conf

configure() {
  mkdir -p "$folder"/{state,spool,munge}
  chmod 755 "$folder" "$folder"/munge
  head -c 128 /dev/urandom > "$folder"/munge/key
  chmod 400 "$folder"/munge/key
  local host; host=$(hostname -s)
  cat > "$SLURM_CONF" <<END
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
SlurmctldPort=$((20000 + $$ % 10000))
SlurmdPort=$((30000 + $$ % 10000))
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
ReturnToService=2
OverTimeLimit=0
KillWait=5
MinJobAge=30
MaxArraySize=${MAX_ARRAY_SIZE:-8}
NodeName=$host NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
}

runs() { grep -qs '^State:[[:space:]]*[^Z]' "/proc/$1/status"; }  # and is no zombie

end() {  # PIDFILE [SIGNAL]: ends the process that it names, and waits for it
  local pid
  [ -s "$1" ] || return 0
  pid=$(cat "$1")
  kill -"${2:-TERM}" "$pid" 2> /dev/null || return 0
  for _ in $(seq 100); do runs "$pid" || return 0; sleep 0.1; done
  kill -KILL "$pid" 2> /dev/null || true
}

until_up() {
  for _ in $(seq 100); do
    [ "$(sinfo -h -o %t 2> /dev/null)" = "${1:-idle}" ] && return 0
    sleep 0.2
  done
  echo "SLURM does not start; its last lines:" >&2
  tail -n 20 "$folder"/*.log >&2
  return 1
}

case $act in
  start)
    configure
    munged --force --key-file="$folder"/munge/key --socket="$folder"/munge/socket \
      --pid-file="$folder"/munge.pid --log-file="$folder"/munge.log \
      --seed-file="$folder"/munge/seed
    slurmctld -c
    slurmd -c
    until_up idle
    ;;
  controller)
    end "$folder"/slurmctld.pid  # saves its state; a kill within 30 seconds of a launch loses it
    slurmctld
    for _ in $(seq 100); do scontrol ping 2> /dev/null | grep -q "is UP" && exit 0; sleep 0.2; done
    exit 1
    ;;
  stop)
    scancel --me 2> /dev/null || true
    for _ in $(seq 100); do [ -n "$(squeue --me -h 2> /dev/null)" ] || break; sleep 0.1; done
    for daemon in slurmd slurmctld munge; do end "$folder/$daemon".pid; done
    ;;
  *)
    echo "start, controller or stop, not $act" >&2
    exit 1
    ;;
esac
