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

// Looks up the token before each sampled one of the rows whose logits are processed.
int32_t find_previous_tokens(const Job& job) {
  for (int64_t i = 0; i < job.process.rows; ++i) {
    int64_t line = job.lines[i], at = job.positions[i];
    if (line < 0 || line >= job.table_lines || at < 0 || at >= job.table_width) return STATUS_INDEX;
    job.previous_tokens[i] = job.table[line * job.table_width + at];
  }
  return STATUS_OK;
}

// Samples the rows: first those whose logits are processed, a few at a time, so that their
// processed logits stay in the cache.
int32_t sample_rows(Context* context, const Job& job) {
  int32_t status = find_previous_tokens(job);
  SampleArgs draw = job.draw;
  LogitsArgs process = job.process;
  auto pass = [&](int64_t rows) {
    draw.req_indices += rows;
    draw.positions += rows;
    draw.out += rows;
    process.logits = static_cast<const char*>(process.logits) +
                     rows * process.row_stride * size_of(process.dtype);
    process.req_indices += rows;
    process.positions += rows;
    process.host_token_ids += rows;
    if (process.mask_slots) process.mask_slots += rows;
  };
  draw.logits = process.out;
  draw.row_stride = process.vocab_size;
  draw.dtype = DTYPE_F32;
  for (int64_t left = job.process.rows; left > 0 && !status; left -= process.rows) {
    draw.rows = process.rows = least(left, job.rows_per_turn);
    status = asyncllm_process_logits(context, &process);
    if (!status) status = asyncllm_sample(context, &draw);
    pass(process.rows);
  }
  draw.logits = static_cast<const char*>(job.draw.logits) +
                job.process.rows * job.draw.row_stride * size_of(job.draw.dtype);
  draw.row_stride = job.draw.row_stride;
  draw.dtype = job.draw.dtype;
  draw.rows = job.draw.rows - job.process.rows;
  return status || !draw.rows ? status : asyncllm_sample(context, &draw);
}

void copy_blocks(Context* context, const Job& job) {
  int64_t work = 0;
  for (int64_t i = 0; i < job.num_block_arrays; ++i)
    work += job.num_block_copies * job.block_arrays[3 * i + 2];
  share(context, job.num_block_arrays, work, [&](int64_t i, int) {
    const int64_t* array = job.block_arrays + 3 * i;
    char* blocks = reinterpret_cast<char*>(array[0]);
    for (int64_t copy = 0; copy < job.num_block_copies; ++copy) {
      const int64_t* pair = job.block_copies + 2 * copy;
      memcpy(blocks + pair[1] * array[1], blocks + pair[0] * array[1], array[2]);
    }
  });
}

int32_t sample_job(Context* context, const Job* job) {
  const SampleArgs& draw = job->draw;
  int32_t status = draw.rows ? sample_rows(context, *job) : STATUS_OK;
  if (!status && job->top_rows)
    status = asyncllm_top_logprobs(context, draw.logits, draw.row_stride, job->top_rows,
                                   draw.vocab_size, draw.dtype, draw.out, job->top,
                                   job->top_values, job->top_ids);
  if (status || !job->num_tokens) return status;
  memcpy(job->tokens + draw.rows, job->greedy, job->sizes[SIZE_GREEDY] * sizeof(int64_t));
  return keep_tokens(*job);
}

int32_t run_job(Context* context, Job* job) {
  if (!job->program) return sample_job(context, job);
  memcpy(job->to, job->from, job->bytes);
  if (job->num_block_copies) copy_blocks(context, *job);
  int32_t status = asyncllm_run(context, job->program, job->sizes, &job->failed);
  return status ? status : sample_job(context, job);
}

bool is_valid(const Job& j) {
  return j.num_block_copies >= 0 && j.num_block_arrays >= 0 &&
         (!j.num_block_copies || (j.block_copies && j.block_arrays)) && j.bytes >= 0 && (!j.bytes || (j.to && j.from)) && j.draw.rows >= 0 && j.num_tokens >= 0 &&
         j.top_rows >= 0 && j.top_rows <= j.draw.rows && j.process.rows >= 0 &&
         (!j.process.rows || (j.process.rows <= j.draw.rows && j.draw.rows <= j.num_tokens &&
                              j.rows_per_turn > 0 && j.previous_tokens)) &&
         (!j.num_tokens || (j.lines && j.positions && j.tokens && j.table && j.greedy &&
                            j.num_tokens == j.draw.rows + j.sizes[SIZE_GREEDY]));
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
  return is_valid(*job) ? context->queue.submit(context, job) : STATUS_INVALID;
}

API int32_t asyncllm_run_job(Context* context, Job* job) {
  if (!is_open(context)) return STATUS_CLOSED;
  return job->status = is_valid(*job) ? run_job(context, job) : STATUS_INVALID;
}

API int32_t asyncllm_wait(Context* context, const Job* job) {
  if (!is_open(context)) return STATUS_CLOSED;
  context->queue.wait(job);
  return job->status;
}
