#!/usr/bin/env bash
# The paper's downstream tasks on a folder that stock transformers loads: an unpruned one, or one from export_hf.
#
#     pip install "lm_eval[hf,math,longbench]"
#     bash extras/downstream.sh out/for-transformers --device cuda:0 --batch_size 8
#
# What follows the folder goes to lm-evaluation-harness as it is: --limit 20 for a try. Results: FOLDER.lm-eval/TASK/.
set -euo pipefail
if [ ! -f "${1:-}/config.json" ]; then
    echo "usage: bash extras/downstream.sh FOLDER [OPTIONS FOR lm_eval]; FOLDER has no config.json" >&2
    exit 2
fi
folder=${1%/}
shift
if grep -q '"harp"' "$folder/config.json"; then
    echo "downstream.sh: $folder is a pruned folder of ours; make one for transformers first (extras/export_hf.py)" >&2
    exit 2
fi

model="pretrained=$folder,dtype=auto"
if grep -q '"model_type": "gemma2"' "$folder/config.json"; then
    model+=",attn_implementation=eager"  # the only attention of stock transformers that knows softcaps
fi

# task and examples in the prompt, as in the paper's protocol; bbh_cot_fewshot and longbench bring prompts of their own
while read -r task shots; do
    lm_eval --model hf --model_args "$model" --tasks "$task" --num_fewshot "$shots" \
        --output_path "$folder.lm-eval/$task" "$@" </dev/null
done <<'TASKS'
nq_open 5
winogrande 5
arc_challenge 25
boolq 0
openbookqa 0
piqa 0
mmlu 5
triviaqa 5
gsm8k 5
leaderboard_math_hard 4
bbh_cot_fewshot 3
longbench 0
TASKS
