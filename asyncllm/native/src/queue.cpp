#include "queue.h"

#include <string.h>

#include "context.h"
#include "waiting.h"

namespace {

// Writes a step's tokens to the table of token ids, which the next step's program reads.
int32_t keep_tokens(const Job& job) {
  for (int64_t i = 0; i < job.num_tokens; ++i) {
    int64_t line = job.lines[i], at = job.positions[i];
    if (line < 0 || line >= job.table_lines || at < -1 || at >= job.table_width - 1)
      return STATUS_INDEX;
    job.table[line * job.table_width + at + 1] = int32_t(most(job.tokens[i], 0));
  }
  return STATUS_OK;
}

int32_t run_job(Context* context, Job* job) {
  memcpy(job->to, job->from, job->bytes);
  int32_t status = asyncllm_run(context, job->program, job->sizes, &job->failed);
  if (!status && job->draw.rows) status = asyncllm_sample(context, &job->draw);
  const SampleArgs& draw = job->draw;
  if (!status && job->top_rows)
    status = asyncllm_top_logprobs(context, draw.logits, draw.row_stride, job->top_rows,
                                   draw.vocab_size, draw.dtype, draw.out, job->top,
                                   job->top_values, job->top_ids);
  if (status || !job->num_tokens) return status;
  memcpy(job->tokens + job->draw.rows, job->greedy, job->sizes[SIZE_GREEDY] * sizeof(int64_t));
  return keep_tokens(*job);
}

}  // namespace

int32_t Queue::submit(Context* context, Job* job) {
  uint32_t number = submitted_.load(std::memory_order_relaxed);
  if (number - done_.load(std::memory_order_acquire) >= ROOM) return STATUS_INVALID;
  if (!started_) {
    context_ = context;
    if (!start_thread(&thread_, "asyncllm-steps", enter, this)) return STATUS_NO_MEMORY;
    started_ = true;
  }
  jobs_[number % ROOM] = job;
  job->number = number + 1;
  submitted_.store(number + 1);
  if (asleep_.load()) futex_wake(&submitted_, 1);
  return STATUS_OK;
}

void Queue::wait(const Job* job) {
  for (;;) {
    uint32_t done = done_.load();
    if (int32_t(done - uint32_t(job->number)) >= 0) return;
    awaited_.store(true);
    // No wake-up is lost: the waiter sets awaited_ and then reads done_, the queue's thread writes
    // done_ and then reads awaited_. At least one of them sees what the other has written.
    if (done_.load() == done) futex_wait(&done_, done);
  }
}

void Queue::stop() {
  if (!started_) return;
  ended_.store(true);
  futex_wake(&submitted_, 1);
  join_thread(&thread_);
  started_ = false;
}

void* Queue::enter(void* at) {
  lengthen_slice();
  static_cast<Queue*>(at)->serve();
  return nullptr;
}

void Queue::serve() {
  uint32_t number = 0;
  for (;;) {
    auto called = [&] { return submitted_.load(std::memory_order_acquire) != number; };
    if (!called() && !spin([&] { return called() || ended_.load(std::memory_order_relaxed); })) {
      asleep_.store(true);
      if (!ended_.load() && submitted_.load() == number) futex_wait(&submitted_, number);
      asleep_.store(false);
      continue;
    }
    if (!called()) return;
    Job* job = jobs_[number % ROOM];
    job->status = run_job(context_, job);
    done_.store(++number);
    if (awaited_.exchange(false)) futex_wake(&done_, 1);
  }
}

API int32_t asyncllm_submit(Context* context, Job* job) {
  if (!is_open(context)) return STATUS_CLOSED;
  const Job& j = *job;
  if (j.bytes < 0 || (j.bytes && (!j.to || !j.from)) || j.draw.rows < 0 || j.num_tokens < 0 ||
      j.top_rows < 0 || j.top_rows > j.draw.rows ||
      (j.num_tokens && (!j.lines || !j.positions || !j.tokens || !j.table || !j.greedy ||
                        j.num_tokens != j.draw.rows + j.sizes[SIZE_GREEDY])))
    return STATUS_INVALID;
  return context->queue.submit(context, job);
}

API int32_t asyncllm_wait(Context* context, const Job* job) {
  if (!is_open(context)) return STATUS_CLOSED;
  context->queue.wait(job);
  return job->status;
}
